"""Values and rules: queues, messages, receipts, commands, outcomes, events and errors.

Strategy: everything here is data or a pure function of its arguments. No I/O, no clock, no await; standard library and
msgspec only, so that every other room can import it and none is imported here. Times are `Instant`s or durations whose
names end in `_us`; sizes end in `_bytes`.

`settings` is what somebody has set, `messages` is one message; what is asked, answered and recorded stands here.
"""
