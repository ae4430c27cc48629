"""Benchmarks, reports, proofs of many cases, pictures: what stands beside the calls."""
