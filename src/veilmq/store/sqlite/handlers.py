"""The handler of each kind of command, and the order in which a batch runs the kinds.

Strategy: one table. Commands of an operator come as one `Operate`, which runs the commands in it through the same table
(upkeep/operators.py).
"""

from collections.abc import Callable
from typing import Any

from veilmq.model.commands import (
    CancelJob,
    CancelMove,
    ChangeQueue,
    ChangeSubscription,
    ChangeTopic,
    CheckClock,
    CreateQueue,
    CreateTopic,
    Delete,
    DeleteQueue,
    DeleteTopic,
    DescribeQueue,
    DescribeSubscription,
    DescribeTopic,
    DropQuarantined,
    Extend,
    ListMoves,
    ListQueues,
    ListSubscriptions,
    ListTopics,
    Operate,
    Publish,
    PurgeQueue,
    Receive,
    RecordPeek,
    RecordPolls,
    RecordPush,
    RevertPlan,
    Send,
    StartJob,
    StartMove,
    Subscribe,
    SuggestPlan,
    Sweep,
    Undeliver,
    Unsubscribe,
)
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.access import CloseSession, OpenSession, Share, UseSession
from veilmq.model.settings.queue import DropTemplate, KeepTemplate, ListTemplates
from veilmq.store.sqlite import leases, upkeep
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.leases import handles
from veilmq.store.sqlite.messages import dead_letters, flush, sends
from veilmq.store.sqlite.settings import queue_commands, queue_lists, topic_commands
from veilmq.store.sqlite.upkeep import jobs, operators
from veilmq.store.sqlite.upkeep.jobs import move_tasks

Handler = Callable[[Writer, Any], Outcome]
GroupHandler = Callable[[Writer, list[Any]], list[Outcome]]


def _each(handler: Handler) -> GroupHandler:
    """Handle a group of commands one after the other."""
    return lambda writer, commands: [handler(writer, command) for command in commands]


def _flushed(handler: Handler) -> GroupHandler:
    """The same, for commands that need every message in the tables."""

    def handle(writer: Writer, commands: list[Any]) -> list[Outcome]:
        flush(writer)
        return [handler(writer, command) for command in commands]

    return handle


def serial_order(sweep: Handler) -> dict[type, GroupHandler]:
    """The handler of each kind of command, in the order in which a batch runs the kinds.

    A message that is sent can be received in the same batch, and a use of a handle comes before any claim that could
    take its message (docs/decisions/0003-one-batch-by-kind.md).
    """

    def operate(writer: Writer, command: Operate) -> Outcome:
        return operators.operate(writer, command, lambda each: table[type(each)](writer, [each])[0])

    table: dict[type, GroupHandler] = {
        CreateQueue: _each(queue_commands.create),
        ChangeQueue: _flushed(queue_commands.change),
        SuggestPlan: _flushed(queue_commands.suggest_plan),
        RevertPlan: _flushed(queue_commands.revert_plan),
        KeepTemplate: _each(operators.keep_template),
        DropTemplate: _each(operators.drop_template),
        ListTemplates: _each(operators.list_templates),
        StartMove: _flushed(move_tasks.start),
        CancelMove: _flushed(move_tasks.cancel),
        StartJob: _flushed(jobs.start),
        CancelJob: _flushed(jobs.cancel),
        CreateTopic: _each(topic_commands.create),
        ChangeTopic: _each(topic_commands.change),
        Subscribe: _each(topic_commands.subscribe),
        ChangeSubscription: _each(topic_commands.change_subscription),
        Publish: _each(topic_commands.publish),
        Send: sends.send_all,
        Delete: handles.delete_all,
        Extend: handles.extend_all,
        Undeliver: _each(handles.undeliver),
        CheckClock: _each(upkeep.check_clock),
        Operate: _each(operate),
        CloseSession: _each(operators.close_session),
        OpenSession: _each(operators.open_session),
        UseSession: _each(operators.use_session),
        Share: _each(operators.share),
        Sweep: _flushed(sweep),
        Receive: leases.receive_all,
        DropQuarantined: _each(dead_letters.drop_quarantined),
        PurgeQueue: _flushed(queue_commands.purge),
        DeleteQueue: _flushed(queue_commands.delete),
        DescribeQueue: _each(queue_commands.describe),
        ListQueues: _each(queue_lists.list_queues),
        ListMoves: _each(move_tasks.list_moves),
        RecordPeek: _each(upkeep.record_peek),
        RecordPolls: _each(upkeep.record_polls),
        RecordPush: _each(topic_commands.record_push),
        Unsubscribe: _flushed(topic_commands.unsubscribe),
        DeleteTopic: _flushed(topic_commands.delete),
        DescribeTopic: _each(topic_commands.describe),
        ListTopics: _each(topic_commands.list_topics),
        DescribeSubscription: _each(topic_commands.describe_subscription),
        ListSubscriptions: _each(topic_commands.list_subscriptions),
    }
    return table
