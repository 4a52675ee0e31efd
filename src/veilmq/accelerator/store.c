/* Unflushed messages: their rows and events when they are sent. */

#include "accelerator.h"

static int add_to(PyObject *list, PyObject *made) /* steals it */
{
    int failed = !made || PyList_Append(list, made) < 0;
    Py_XDECREF(made);
    return failed ? -1 : 0;
}

/* Whether a command is a plain Send to that queue from that sender, of at most that many bytes. */
static int is_plain_send(PyObject *bound, PyObject *command, PyObject *queue, PyObject *origin, Py_ssize_t bytes_max)
{
    PyObject *size, *priority;
    if (!is_a(command, CONSTANT(0)) || field(command, QUEUE) != queue || field(command, ORIGIN) != origin
        || field(command, EXTRAS) != CONSTANT(1) || !is_none(command, DELAY_US) || !is_none(command, TTL_US)
        || field(command, WANTS_HANDLE) != Py_False || field(command, FROM_XML) != Py_False
        || field(command, MUST_APPEAR) != Py_False || !(size = field(command, SIZE_BYTES))
        || !(priority = field(command, PRIORITY)) || !PyLong_CheckExact(size) || priority != CONSTANT(6))
        return 0;
    Py_ssize_t bytes = PyLong_AsSsize_t(size);
    PyErr_Clear(); /* a number that is too large */
    PyObject *body = field(command, BODY), *md5 = field(command, MD5);
    return bytes >= 0 && bytes <= bytes_max && body && PyUnicode_CheckExact(body) && md5 && PyBytes_CheckExact(md5);
}

/* Twin: veilmq.store.sqlite.messages.sends.plain_rows(commands, ids, shared).
 * Constants: Send, NO_EXTRAS, MessageRow, Unflushed, Event, Sent, the default priority, Kind.SENT. */
FUNCTION(accel_plain_rows)
{
    REQUIRE_ARGUMENTS("plain_rows", 3);
    PyObject *commands = args[0], *ids = args[1], *shared = args[2];
    PyObject *queue, *origin, *generation, *incarnation, *origin_row, *principal, *now, *expires;
    Py_ssize_t bytes_max, total = 0;
    long long sequence;
    if (!PyList_CheckExact(commands) || !PyList_CheckExact(ids))
        return PyErr_Format(PyExc_TypeError, "plain_rows takes two lists");
    if (!PyArg_ParseTuple(shared, "OOOOOOOOLn", &queue, &origin, &generation, &incarnation, &origin_row, &principal, &now,
                          &expires, &sequence, &bytes_max))
        return NULL;
    PyObject *lists = Py_BuildValue("[][][][]"), *zero = PyLong_FromLong(0), *one = PyLong_FromLong(1);
    int failed = !lists || !zero || !one;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(commands) && i < PyList_GET_SIZE(ids); i++) {
        PyObject *command = PyList_GET_ITEM(commands, i), *none = Py_None;
        PyObject *id = PyList_GET_ITEM(ids, PyList_GET_SIZE(ids) - 1 - i);
        if (!is_plain_send(bound, command, queue, origin, bytes_max))
            break;
        PyObject *body = PyUnicode_AsUTF8String(field(command, BODY)), *number = PyLong_FromLongLong(sequence + i + 1);
        PyObject *size = body ? PyLong_FromSsize_t(PyBytes_GET_SIZE(body)) : NULL, *row = NULL;
        failed = !body || !number || !size;
        if (!failed && PyBytes_GET_SIZE(body) > bytes_max) {
            Py_DECREF(body), Py_DECREF(number), Py_DECREF(size);
            break;
        }
        if (!failed) {
            PyObject *fields[] = {number, generation, CONSTANT(6), one, CONSTANT(6), id, now, none, principal, none, none,
                                  none, field(command, MD5), body};
            row = PyObject_Vectorcall(CONSTANT(2), fields, 14, NULL);
            failed = !row;
        }
        if (!failed) {
            PyObject *message[] = {row, CONSTANT(1)};
            PyObject *event[] = {CONSTANT(7), now, incarnation, origin_row, id, number, zero, zero, none, none, now, now,
                                 none, size};
            PyObject *sent[] = {id, number, now, now, expires};
            failed = add_to(PyTuple_GET_ITEM(lists, 0), Py_NewRef(row))
                     || add_to(PyTuple_GET_ITEM(lists, 1), PyObject_Vectorcall(CONSTANT(3), message, 2, NULL))
                     || add_to(PyTuple_GET_ITEM(lists, 2), PyObject_Vectorcall(CONSTANT(4), event, 14, NULL))
                     || add_to(PyTuple_GET_ITEM(lists, 3), PyObject_Vectorcall(CONSTANT(5), sent, 5, NULL));
            total += PyBytes_GET_SIZE(body);
        }
        Py_XDECREF(body), Py_XDECREF(number), Py_XDECREF(size), Py_XDECREF(row);
    }
    PyObject *answer = failed ? NULL : Py_BuildValue("On", lists, total);
    Py_XDECREF(lists), Py_XDECREF(zero), Py_XDECREF(one);
    return answer;
}
