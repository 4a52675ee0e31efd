"""placeholder"""
import time
from veilmq.model.instant import Instant
def wall() -> Instant:
    return Instant(time.time_ns() // 1000)
