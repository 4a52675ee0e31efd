/* What the files of the accelerator share. `module.c` lists the functions, each with its twin in Python.
 *
 * Rules: every function is pure (apart from the values that read_plain remembers), takes only what its twin takes, and
 * returns None wherever something is unusual, so that Python decides. Bytes from outside are read through a Span or
 * with an index that is compared with the length first. Nothing is allocated by a number that a client wrote. */

#ifndef VEILMQ_ACCELERATOR_H
#define VEILMQ_ACCELERATOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Bytes of somebody else: `size` of them at `at`. */
typedef struct {
    const uint8_t *at;
    Py_ssize_t size;
} Span;

#define CONSTANT(number) PyTuple_GET_ITEM(bound, number)
#define FUNCTION(name) PyObject *name(PyObject *bound, PyObject *const *args, Py_ssize_t count)

FUNCTION(accel_read_plain);
FUNCTION(accel_plain_send);
FUNCTION(accel_plain_sends);
FUNCTION(accel_plain_deletes);
FUNCTION(accel_sent_json);
FUNCTION(accel_entries_json);
FUNCTION(accel_plain_scheme);
FUNCTION(accel_received_json);
FUNCTION(accel_plain_rows);

/* hashes.c */
#define SHA256_BYTES 32
#define MD5_BYTES 16

typedef struct {
    uint32_t state[8];
    uint64_t length;
    uint8_t block[64];
} Sha256;

int sha256_available(void);
void sha256_begin(Sha256 *hash);
void sha256_add(Sha256 *hash, const uint8_t *data, size_t size);
void sha256_end(Sha256 *hash, uint8_t digest[SHA256_BYTES]);
void md5(const uint8_t *data, size_t size, uint8_t digest[MD5_BYTES]);

void write_hex(uint8_t *to, const uint8_t *from, size_t size);

/* Names of attributes, made once. */
extern PyObject *name_of[];
enum {
    AUTHORITY, BODY, BODY_BYTES_MAX, COMMAND, DAY, DELAY_SECONDS, DELAY_US, EXTRAS, FROM_XML, HANDLE,
    HEADER_BYTES_MAX, HEADER_COUNT_MAX, HEADERS, ID, KNOWN, MD5, MESSAGE_ATTRIBUTES, MESSAGE_BODY,
    MESSAGE_DEDUPLICATION_ID, MESSAGE_GROUP_ID, MESSAGE_SYSTEM_ATTRIBUTES, METHOD, MUST_APPEAR, ORIGIN, PRIORITY,
    QUEUE, RECEIPT_HANDLE, REFUSAL, REST, SCOPE, SHAPES, SIGNED, SIGNING_KEY, SIZE_BYTES, TARGET, TTL_US,
    WANTS_HANDLE, NAMES
};

/* The place of a struct's field; NULL if the type has none. */
PyObject **place(PyObject *of, int name);

/* The field's value, borrowed; NULL if there is none. */
static inline PyObject *field(PyObject *of, int name)
{
    PyObject **found = place(of, name);
    return found ? *found : NULL;
}

static inline int is_none(PyObject *of, int name) { return field(of, name) == Py_None; }
static inline int is_a(PyObject *some, PyObject *type) { return (PyObject *)Py_TYPE(some) == type; }

/* What a function returns where it leaves the work to Python. */
static inline PyObject *none_unless_failed(void) { return PyErr_Occurred() ? NULL : Py_NewRef(Py_None); }

static inline Span bytes_of(PyObject *some)
{
    return (Span){(const uint8_t *)PyBytes_AS_STRING(some), PyBytes_GET_SIZE(some)};
}
extern PyObject *send_keywords, *delete_keywords;

/* A wrong call of ours, not of a client: TypeError. */
int wrong_arguments(const char *name, Py_ssize_t count, Py_ssize_t wanted);
#define REQUIRE_ARGUMENTS(name, wanted) if (wrong_arguments(name, count, wanted)) return NULL

#endif
