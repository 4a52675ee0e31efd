"""make bench: our server against its pinned peers, measured alternating.

Without a scenario flag: the lifecycle (send, receive, delete in equal parts), one message a request and ten.
Installs what is missing, prints the table, writes it to bench/results/. Exit code 0 if every run counted, 1 if one was
void or something acknowledged was lost, 2 if something is missing or a server did not start.
"""

import argparse
import contextlib
import resource
import signal
import sys
from types import FrameType

import azure_queues
import install
import measure
import mns_queues
import peers
import report
import scenarios
from parked import parked
from sqs import CallFailed

import push


def parse(argv: list[str]) -> argparse.Namespace:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench/run.py", description=__doc__, formatter_class=shape)
    names = ", ".join(peers.KINDS)
    add = parser.add_argument
    add("--server", default="veilmq", choices=peers.KINDS, help="the server under test (default: veilmq)")
    add("--peers", type=_names, help=f"comma-separated, of {names} (default: all for the lifecycle, else none)")
    add("--pairs", type=_positive, help="interleaved pairs (default 5; with --quick 2)")
    add("--seconds", type=_positive, help="seconds a run (default 10; with --quick 3)")
    add("--batch", type=_numbers, help="messages a request, comma-separated (default 1,10)")
    add("--connections", type=_numbers, help="comma-separated (default 32, and 128 where fdatasync takes over 0.5 ms)")
    add("--proto", choices=("json", "query"), default="json", help="wire form; a peer without it decides its pair's")
    add("--deep", type=_positive, metavar="N", help="depth: speed with N messages in the queue against 1,000")
    add("--parked", type=_positive, metavar="N", help="idle cost of N parked long polls, and how fast one is answered")
    of_azure = "the Azure protocol against azurite, shallow and with N messages in the queue (20,000)"
    of_restart = "first answer after stops and kills with N messages (1,000,000)"
    add("--azure", type=_positive, metavar="N", nargs="?", const=20_000, help=of_azure)
    add("--mns", action="store_true", help="the MNS protocol against SQS, on one server")
    add("--push", action="store_true", help="delay of pushes to healthy endpoints, beside 20 dead ones and without")
    add("--restart", type=_positive, metavar="N", nargs="?", const=1_000_000, help=of_restart)
    add("--quick", action="store_true", help="short runs, marked as not to be quoted")
    add("--install-only", action="store_true", help="install the peers and end")
    options = parser.parse_args(argv)
    options.pairs = options.pairs or (2 if options.quick else 5)
    options.seconds = options.seconds or (3 if options.quick else 10)
    options.extra = bool(
        options.deep or options.parked or options.restart or options.azure or options.mns or options.push
    )
    if not options.extra and not options.batch:
        options.batch = [1, 10]
    return options


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in peers.KINDS]:
        raise argparse.ArgumentTypeError(f"no such server: {', '.join(unknown)}; there are {', '.join(peers.KINDS)}")
    return names


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def bench(options: argparse.Namespace) -> bool:
    """Run what was asked for; whether every run counted."""
    peers.DATA.mkdir(exist_ok=True)
    measure.refuse_memory(peers.DATA)
    wrk = install.wrk()
    named = options.peers
    if named is None:
        named = [name for name in peers.KINDS if name != "veilmq-python"] if options.batch else []
    ours = peers.KINDS[options.server]()
    others = [peers.KINDS[name]() for name in named if name != options.server]
    for peer in (ours, *others):
        peer.install()
    if options.install_only:
        return True
    settings = scenarios.Settings(wrk, options.pairs, options.seconds, options.proto, say=_say)
    load = measure.load_1min()
    disk = measure.fdatasync(peers.DATA)
    connections = options.connections or ([32, 128] if disk.p50_us > report.SLOW_DISK_US else [32])
    _say(f"fdatasync p50 {disk.p50_us / 1000:.3f} ms, p99 {disk.p99_us / 1000:.3f} ms; load {load:.2f}")
    everyone, fine = [ours, *others], True

    def finish(kind: str, name: str, result: scenarios.Result, involved: list[peers.Peer]) -> None:
        nonlocal fine
        print("\n" + report.write(kind, name, result, involved, disk, load, options.quick) + "\n", flush=True)
        fine &= report.counted(kind, result)

    for batch in options.batch or []:
        name = "single" if batch == 1 else f"batch{batch}"
        finish("lifecycle", name, scenarios.lifecycle(ours, others, batch, connections, settings), everyone)
    if options.deep:
        finish("depth", "depth", scenarios.depth(everyone, options.deep, connections[0], settings), everyone)
    if options.parked:
        finish("parked", "parked", parked(everyone, options.parked, settings), everyone)
    if options.azure:
        ours_there, azurite = azure_queues.VeilMQ(), azure_queues.Azurite()
        for peer in (ours_there, azurite):
            peer.install()
        rows = azure_queues.against(ours_there, azurite, options.azure, connections[0], settings)
        finish("lifecycle", "azure", rows, [ours_there, azurite])
        finish("depth", "azure-depth", azure_queues.depth(ours_there, connections[0], settings), [ours_there])
    if options.mns:
        speaker = mns_queues.VeilMQ()
        speaker.install()
        rows = mns_queues.against_sqs(speaker, options.batch or [1], connections[0], settings)
        finish("lifecycle", "mns", rows, [speaker])
    if options.push:
        fine &= (
            push.bench(options.pairs, push.COUNT // 4 if options.quick else push.COUNT, push.RATE, options.quick) < 2
        )
    if options.restart:
        finish("restart", "restart", scenarios.restart(ours, options.restart, settings), [ours])
    return fine


def _say(text: str) -> None:
    print(text, flush=True)


def _ended(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _ended)
    # Thousands of parked connections, here and in the server that inherits this.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return 0 if bench(options) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (install.Missing, peers.ServerGone, measure.MeasureFailed, CallFailed, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    finally:
        peers.stop_all()
        with contextlib.suppress(OSError):
            peers.DATA.rmdir()  # not while another run has its files there


if __name__ == "__main__":
    sys.exit(main())
