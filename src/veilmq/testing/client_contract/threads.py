"""Many threads on one queue object."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from veilmq.testing.client_contract.stage import LONG, Stage

THREADS = 8
EACH = 12


class TestThreads:
    """A queue is safe to call from many threads."""

    def test_what_some_send_others_receive_once(self, stage: Stage) -> None:
        queue = stage.create()

        def send(thread: int) -> None:
            for number in range(EACH):
                queue.send(f"{thread}-{number}")

        def take(thread: int) -> list[str]:
            bodies = []
            while received := queue.receive(2, lease=LONG, wait=1):
                for message in received:
                    handle = queue.extend(message.handle, LONG)
                    queue.delete(handle)
                    bodies.append(message.body)
                    done.append(message.id)
                if len(done) >= THREADS * EACH:
                    break
            return bodies

        done: list[str] = []
        with ThreadPoolExecutor(2 * THREADS) as pool:
            sending = [pool.submit(partial(send, thread)) for thread in range(THREADS)]
            for future in sending:
                future.result()
            taking = [pool.submit(partial(take, thread)) for thread in range(THREADS)]
            bodies = Counter(body for future in taking for body in future.result())
        assert bodies == Counter(f"{thread}-{number}" for thread in range(THREADS) for number in range(EACH))
        stats = queue.stats()
        assert (stats.visible, stats.in_flight or 0) == (0, 0)
