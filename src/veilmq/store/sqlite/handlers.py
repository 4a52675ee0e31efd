"""The handler of each kind of command, and the order in which a batch runs the kinds.

Strategy: one table. Commands of an operator come as one `Operate`, which runs the commands in it through the same table
(upkeep/operators.py).
"""

from collections.abc import Callable
from typing import Any

from veilmq.model import commands
from veilmq.model.errors import QueueMissing
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.access import CloseSession, OpenSession, Share, UseSession
from veilmq.model.settings.queue import DropTemplate, KeepTemplate, ListTemplates
from veilmq.store.sqlite import leases, upkeep
from veilmq.store.sqlite.batch import Writer
from veilmq.store.sqlite.batch.queues import LiveQueue
from veilmq.store.sqlite.leases import handles
from veilmq.store.sqlite.messages import dead_letters, flush, sends
from veilmq.store.sqlite.settings import queue_commands, queue_lists, topic_commands
from veilmq.store.sqlite.upkeep import jobs, operators
from veilmq.store.sqlite.upkeep.jobs import move_tasks

Handler = Callable[[Writer, Any], Outcome]
GroupHandler = Callable[[Writer, list[Any]], list[Outcome]]


def _each(handler: Handler) -> GroupHandler:
    """Handle a group of commands one after the other."""
    return lambda writer, group: [handler(writer, command) for command in group]


def _flushed(handler: Handler) -> GroupHandler:
    """The same, for commands that need every message in the tables."""

    def handle(writer: Writer, group: list[Any]) -> list[Outcome]:
        flush(writer)
        return [handler(writer, command) for command in group]

    return handle


def _of_queue(handler: Callable[[Writer, Any, LiveQueue], Outcome]) -> Handler:
    """Handle a command on a queue: if there is none of that name, the outcome is QueueMissing."""

    def handle(writer: Writer, command: Any) -> Outcome:
        queue = writer.queues.by_key.get(command.queue)
        return QueueMissing(queue=str(command.queue)) if queue is None else handler(writer, command, queue)

    return handle


def serial_order(sweep: Handler) -> dict[type, GroupHandler]:
    """The handler of each kind of command, in the order in which a batch runs the kinds.

    A message that is sent can be received in the same batch, and a use of a handle comes before any claim that could
    take its message (docs/decisions/0003-one-batch-by-kind.md).
    """

    def operate(writer: Writer, command: commands.Operate) -> Outcome:
        return operators.operate(writer, command, lambda each: table[type(each)](writer, [each])[0])

    table: dict[type, GroupHandler] = {
        commands.CreateQueue: _each(queue_commands.create),
        commands.ChangeQueue: _flushed(_of_queue(queue_commands.change)),
        commands.SuggestPlan: _flushed(_of_queue(queue_commands.suggest_plan)),
        commands.RevertPlan: _flushed(_of_queue(queue_commands.revert_plan)),
        KeepTemplate: _each(_of_queue(operators.keep_template)),
        DropTemplate: _each(_of_queue(operators.drop_template)),
        ListTemplates: _each(_of_queue(operators.list_templates)),
        commands.StartMove: _flushed(_of_queue(move_tasks.start)),
        commands.CancelMove: _flushed(_of_queue(move_tasks.cancel)),
        commands.StartJob: _flushed(_of_queue(jobs.start)),
        commands.CancelJob: _flushed(jobs.cancel),
        commands.CreateTopic: _each(topic_commands.create),
        commands.ChangeTopic: _each(topic_commands.change),
        commands.Subscribe: _each(topic_commands.subscribe),
        commands.ChangeSubscription: _each(topic_commands.change_subscription),
        commands.Publish: _each(topic_commands.publish),
        commands.Send: sends.send_all,
        commands.Delete: handles.delete_all,
        commands.Extend: handles.extend_all,
        commands.Undeliver: _each(handles.undeliver),
        commands.CheckClock: _each(upkeep.check_clock),
        commands.Operate: _each(operate),
        CloseSession: _each(operators.close_session),
        OpenSession: _each(operators.open_session),
        UseSession: _each(operators.use_session),
        Share: _each(operators.share),
        commands.Sweep: _flushed(sweep),
        commands.Receive: leases.receive_all,
        commands.DropQuarantined: _each(_of_queue(dead_letters.drop_quarantined)),
        commands.PurgeQueue: _flushed(_of_queue(queue_commands.purge)),
        commands.DeleteQueue: _flushed(_of_queue(queue_commands.delete)),
        commands.DescribeQueue: _each(_of_queue(queue_commands.describe)),
        commands.ListQueues: _each(queue_lists.list_queues),
        commands.ListMoves: _each(_of_queue(move_tasks.list_moves)),
        commands.RecordPeek: _each(_of_queue(upkeep.record_peek)),
        commands.RecordPolls: _each(upkeep.record_polls),
        commands.RecordPush: _each(topic_commands.record_push),
        commands.Unsubscribe: _flushed(topic_commands.unsubscribe),
        commands.DeleteTopic: _flushed(topic_commands.delete),
        commands.DescribeTopic: _each(topic_commands.describe),
        commands.ListTopics: _each(topic_commands.list_topics),
        commands.DescribeSubscription: _each(topic_commands.describe_subscription),
        commands.ListSubscriptions: _each(topic_commands.list_subscriptions),
    }
    return table
