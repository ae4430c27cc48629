"""The algorithms, each a pure function from (topology, rank, parameters) to a schedule."""

from hiercoll.algorithms import (
    allgather,
    allgather_nodes,
    allreduce,
    alltoall,
    alltoall_nodes,
    alltoallv,
    barrier,
    bcast,
    gather_scatter,
    pat,
    reduce,
    reduce_nodes,
    swing,
    trees,
)
from hiercoll.algorithms.registry import REGISTRY, Algorithm, Parameter, Params, get_algorithm, register

__all__ = [
    "REGISTRY",
    "Algorithm",
    "Parameter",
    "Params",
    "allgather",
    "allgather_nodes",
    "allreduce",
    "alltoall",
    "alltoall_nodes",
    "alltoallv",
    "barrier",
    "bcast",
    "gather_scatter",
    "get_algorithm",
    "pat",
    "reduce",
    "reduce_nodes",
    "register",
    "swing",
    "trees",
]
