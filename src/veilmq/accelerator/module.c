/* The accelerator: what a request spends most in, as small functions. `__init__.py` says when they are used; each
 * function's comment names its twin in Python, which is used without the accelerator. `bind(name, constants)` makes one,
 * with the types that it makes or expects. */

#include "accelerator.h"
#include <structmember.h>

int prepare_http(void);

PyObject *name_of[NAMES], *send_keywords, *delete_keywords;
static const char *const NAME_TEXTS[NAMES] = {
    "authority", "body", "body_bytes_max", "command", "day", "delay_seconds", "delay_us", "extras", "from_xml",
    "handle", "header_bytes_max", "header_count_max", "headers", "id", "known", "md5", "message_attributes",
    "message_body", "message_deduplication_id", "message_group_id", "message_system_attributes", "method",
    "must_appear", "origin", "priority", "queue", "receipt_handle", "refusal", "rest", "scope", "shapes", "names",
    "signing_key", "size_bytes", "target", "ttl_us", "wants_handle",
};

#define ONE(name, constants) {{#name, (PyCFunction)(void (*)(void))accel_##name, METH_FASTCALL, NULL}, constants}
static struct {
    PyMethodDef method;
    Py_ssize_t constants;
} functions[] = {
    ONE(read_plain, 1), ONE(plain_scheme, 7), ONE(plain_send, 3), ONE(plain_sends, 4),
    ONE(plain_deletes, 3), ONE(sent_json, 3), ONE(entries_json, 5), ONE(received_json, 1),
    ONE(plain_rows, 8),
};

/* A struct's fields are slots: where they are is looked up once for each type, which is kept as long as its entry, so that
 * no other type gets its address. */
PyObject **place(PyObject *of, int name)
{
    static struct { PyTypeObject *type; Py_ssize_t offset; } known[NAMES][8];
    PyTypeObject *type = Py_TYPE(of);
    size_t line = (uintptr_t)type / 64 % 8;
    Py_ssize_t offset = known[name][line].offset;
    if (known[name][line].type != type) {
        PyObject *found = PyObject_GetAttr((PyObject *)type, name_of[name]);
        offset = 0;
        if (found && Py_IS_TYPE(found, &PyMemberDescr_Type)) {
            PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
            offset = member->type == T_OBJECT_EX ? member->offset : 0;
        }
        Py_XDECREF(found);
        PyErr_Clear();
        if (offset < (Py_ssize_t)sizeof(PyObject))
            return NULL;
        known[name][line].offset = offset;
        Py_XSETREF(known[name][line].type, (PyTypeObject *)Py_NewRef(type));
    }
    return (PyObject **)((char *)of + offset);
}

int wrong_arguments(const char *name, Py_ssize_t count, Py_ssize_t wanted)
{
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, count);
    return count != wanted;
}

static PyObject *bind(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    REQUIRE_ARGUMENTS("bind", 2);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (!PyUnicode_Check(args[0]) || PyUnicode_CompareWithASCIIString(args[0], functions[i].method.ml_name))
            continue;
        if (functions[i].method.ml_meth == (PyCFunction)(void (*)(void))accel_plain_scheme && !sha256_available())
            Py_RETURN_NONE;
        if (!PyTuple_CheckExact(args[1]) || PyTuple_GET_SIZE(args[1]) != functions[i].constants)
            return PyErr_Format(PyExc_TypeError, "%U has %zd constants", args[0], functions[i].constants);
        return PyCFunction_NewEx(&functions[i].method, args[1], NULL);
    }
    return PyErr_Format(PyExc_LookupError, "the accelerator has no function %R", args[0]);
}

static PyMethodDef methods[] = {
    {"bind", (PyCFunction)(void (*)(void))bind, METH_FASTCALL,
     "bind(name, constants): the function of that name; None if this processor lacks what it needs."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_doc = "See veilmq.accelerator.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    for (int i = 0; i < NAMES; i++)
        if (!(name_of[i] = PyUnicode_InternFromString(NAME_TEXTS[i])))
            return NULL;
    send_keywords = Py_BuildValue("(ssssss)", "queue", "origin", "body", "md5", "size_bytes", "extras");
    delete_keywords = Py_BuildValue("(sssss)", "queue", "origin", "handle", "arrived", "after_expiry");
    if (!send_keywords || !delete_keywords || prepare_http() < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition), *names = PyTuple_New(sizeof functions / sizeof *functions);
    for (size_t i = 0; names && i < sizeof functions / sizeof *functions; i++)
        PyTuple_SET_ITEM(names, i, PyUnicode_FromString(functions[i].method.ml_name));
    if (!module || !names || PyModule_AddObject(module, "functions", names) < 0
        || PyModule_AddIntConstant(module, "sources", VEILMQ_SOURCES) < 0) /* a checksum: tools/accelerator.py */
        return NULL;
    return module;
}
