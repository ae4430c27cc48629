"""What the links between hosts take for an all-to-all, without any MPI: a bound for whatever is sent through them.

Run under MPI with one rank per host. Each sends so many bytes to each other host through TCP, to one host after the
other, and receives as many from another one meanwhile; MPI only starts the ranks and lets them begin together. Prints a
line of JSON per size: the median and the middle half of the slowest rank's seconds.

    scripts/lab run --layout 4x1 --env .venv/mpich -- python scripts/raw_links.py --sizes 16K,128K,1M,8M
"""

from __future__ import annotations

import json
import socket
from select import select
from time import perf_counter
from typing import Any

import click
from mpi4py import MPI

from hiercoll.cli.common import SizesType
from hiercoll.statistics import quartiles

WORLD = MPI.COMM_WORLD


def connect() -> dict[int, socket.socket]:
    """A connection to each other rank."""
    with socket.create_server(("", 0), backlog=WORLD.size) as server:
        addresses = WORLD.allgather((socket.gethostname(), server.getsockname()[1]))
        peers = {}
        for rank in range(WORLD.rank):
            peers[rank] = socket.create_connection(addresses[rank])
            peers[rank].sendall(WORLD.rank.to_bytes(4, "big"))
        for _ in range(WORLD.rank + 1, WORLD.size):
            peer, _ = server.accept()
            peers[int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big")] = peer
    for peer in peers.values():
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setblocking(False)
    return peers


def exchange(peers: dict[int, socket.socket], send: memoryview, recv: memoryview) -> None:
    """Send to each other rank in turn, and receive from another one."""
    for step in range(1, WORLD.size):
        to, source = peers[(WORLD.rank + step) % WORLD.size], peers[(WORLD.rank - step) % WORLD.size]
        out, into = send, recv  # what is left
        while out or into:
            readable, writable, _ = select([source] if into else [], [to] if out else [], [])
            if writable:
                out = out[to.send(out) :]
            if readable:
                into = into[source.recv_into(into) :]


def measure(size: int, seconds: float) -> dict[str, Any]:
    """The record of a number of bytes."""
    peers, times = connect(), list[float]()
    send, recv = memoryview(bytearray(size)), memoryview(bytearray(size))
    while WORLD.bcast(sum(times) < seconds or len(times) < 8):
        WORLD.Barrier()
        begin = perf_counter()
        exchange(peers, send, recv)
        times.append(WORLD.allreduce(perf_counter() - begin, op=MPI.MAX))
    for peer in peers.values():
        peer.close()
    low, middle, high = quartiles(times[3:])  # TCP begins slowly
    seconds_of = {"median": middle, "q1": low, "q3": high}
    return {"bytes": size, "hosts": WORLD.size, "turns": len(times) - 3, "seconds": seconds_of}


@click.command(help=__doc__.splitlines()[0] if __doc__ else "")
@click.option("--sizes", type=SizesType(), default="16K,128K,1M,8M", show_default=True, help="to each other host")
@click.option("--seconds", default=10.0, show_default=True, help="of exchanges for each size")
def main(sizes: tuple[int, ...], seconds: float) -> None:
    """Measure each size."""
    for size in sizes:
        record = measure(size, seconds)
        if WORLD.rank == 0:
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
