/* HTTP: a plain request, taken apart. */

#include "accelerator.h"

/* What a byte may be part of. */
enum { IN_NAME = 1, IN_TARGET = 2, IN_HOST = 4, DIGIT = 8 };
static uint8_t kinds[256];

static void mark(const char *bytes, uint8_t kind)
{
    for (; *bytes; bytes++)
        kinds[(uint8_t)*bytes] |= kind;
}

/* Names that requests have. The value of REPEATING ones is remembered: the next request has it, too. No secret is one. */
enum { TO_LLHTTP = 1, REPEATING = 2 };
enum { HOST, CONNECTION, CONTENT_LENGTH };
static const struct {
    const char *name;
    uint8_t size, how;
} HEADER_NAMES[] = {
#define NAME(text, how) {text, sizeof text - 1, how}
    [HOST] = NAME("host", REPEATING), [CONNECTION] = NAME("connection", REPEATING),
    [CONTENT_LENGTH] = NAME("content-length", 0), NAME("user-agent", REPEATING), NAME("content-type", REPEATING),
    NAME("accept", REPEATING),
    NAME("accept-encoding", REPEATING), NAME("authorization", 0), NAME("x-amz-date", REPEATING),
    NAME("x-amz-target", REPEATING), NAME("x-amz-content-sha256", 0), NAME("x-amz-user-agent", REPEATING),
    NAME("x-amz-security-token", 0), NAME("x-amzn-query-mode", REPEATING), NAME("amz-sdk-request", REPEATING),
    NAME("amz-sdk-invocation-id", 0), NAME("x-ms-version", REPEATING), NAME("x-ms-date", REPEATING),
    NAME("x-ms-client-request-id", 0), NAME("x-mns-version", REPEATING), NAME("date", REPEATING),
    NAME("content-md5", 0), NAME("transfer-encoding", TO_LLHTTP), NAME("upgrade", TO_LLHTTP),
    NAME("expect", TO_LLHTTP), NAME("proxy-connection", TO_LLHTTP),
};
#define HEADER_NAMES_COUNT ((int)(sizeof HEADER_NAMES / sizeof *HEADER_NAMES))
#define REMEMBERED_MAX 256 /* bytes of a value */
static PyObject *known_names[HEADER_NAMES_COUNT], *remembered[HEADER_NAMES_COUNT];
static PyObject *methods[4];
static const char *const METHODS[4] = {"POST", "GET", "PUT", "DELETE"};

int prepare_http(void)
{
    for (int c = 0; c < 128; c++)
        if (Py_ISALNUM(c))
            kinds[c] = IN_NAME | IN_TARGET | IN_HOST | (Py_ISDIGIT(c) ? DIGIT : 0);
    mark("!#$%&'*+.^_`|~-", IN_NAME);
    mark("/?&=%._~:@!$'()*+,;-", IN_TARGET);
    mark("._~!$&'()*+,;=-", IN_HOST);
    for (int i = 0; i < HEADER_NAMES_COUNT; i++)
        if (!(known_names[i] = PyBytes_FromStringAndSize(HEADER_NAMES[i].name, HEADER_NAMES[i].size)))
            return -1;
    for (int i = 0; i < 4; i++)
        if (!(methods[i] = PyUnicode_InternFromString(METHODS[i])))
            return -1;
    return 0;
}

static int all(Span some, uint8_t kind)
{
    for (Py_ssize_t i = 0; i < some.size; i++)
        if (!(kinds[some.at[i]] & kind))
            return 0;
    return 1;
}

/* Twin: is_host, without addresses in brackets and percent signs, which are left to llhttp. */
static int is_host(Span host)
{
    const uint8_t *colon = memchr(host.at, ':', (size_t)host.size);
    Span name = {host.at, colon ? colon - host.at : host.size}, port = {host.at + name.size + 1, host.size - name.size - 1};
    return all(name, IN_HOST) && (!colon || (port.size <= 5 && all(port, DIGIT)));
}

static int find_known(Span name)
{
    for (int i = 0; i < HEADER_NAMES_COUNT; i++)
        if (HEADER_NAMES[i].size == name.size && !memcmp(HEADER_NAMES[i].name, name.at, (size_t)name.size))
            return i;
    return -1;
}

/* A new reference to the value: the one before, if it is the same. */
static PyObject *value_of(int known, Span value)
{
    const char *text = (const char *)value.at;
    if (known < 0 || HEADER_NAMES[known].how != REPEATING || value.size > REMEMBERED_MAX)
        return PyBytes_FromStringAndSize(text, value.size);
    PyObject *before = remembered[known];
    if (before && PyBytes_GET_SIZE(before) == value.size && !memcmp(PyBytes_AS_STRING(before), text, (size_t)value.size))
        return Py_NewRef(before);
    PyObject *made = PyBytes_FromStringAndSize(text, value.size);
    if (made) {
        remembered[known] = Py_NewRef(made);
        Py_XDECREF(before);
    }
    return made;
}

enum { FAILED = -1, UNUSUAL = 0, TAKEN = 1 };

/* Put one header line into the dictionary. */
static int take_header(PyObject *headers, Span line, int *has_host, Span *length)
{
    uint8_t small[32];
    Span name = {line.at, 0}, value;
    while (name.size < line.size && kinds[line.at[name.size]] & IN_NAME)
        name.size++;
    if (!name.size || name.size == line.size || line.at[name.size] != ':')
        return UNUSUAL;
    if (name.size >= 10 && !PyOS_strnicmp((const char *)name.at, "x-ms-meta-", 10))
        return UNUSUAL;
    value.at = line.at + name.size + 1;
    value.size = line.size - name.size - 1;
    for (Py_ssize_t i = 0; i < value.size; i++)
        if (value.at[i] < ' ' || value.at[i] > '~')
            return UNUSUAL;
    while (value.size && value.at[0] == ' ')
        value.at++, value.size--;
    while (value.size && value.at[value.size - 1] == ' ')
        value.size--;
    int known = -1;
    if (name.size <= (Py_ssize_t)sizeof small) {
        for (Py_ssize_t i = 0; i < name.size; i++)
            small[i] = (uint8_t)Py_TOLOWER(line.at[i]);
        known = find_known((Span){small, name.size});
    }
    if (known >= 0 && HEADER_NAMES[known].how == TO_LLHTTP)
        return UNUSUAL;
    if (known == HOST) {
        if (!is_host(value))
            return UNUSUAL;
        *has_host = 1;
    } else if (known == CONNECTION) {
        if (value.size != 10 || PyOS_strnicmp((const char *)value.at, "keep-alive", 10))
            return UNUSUAL;
    } else if (known == CONTENT_LENGTH) {
        *length = value;
    }
    /* Made empty and then filled: bytes made of one character are shared. */
    PyObject *key = known < 0 ? PyBytes_FromStringAndSize(NULL, name.size) : Py_NewRef(known_names[known]);
    for (Py_ssize_t i = 0; key && known < 0 && i < name.size; i++)
        PyBytes_AS_STRING(key)[i] = (char)Py_TOLOWER(name.at[i]);
    PyObject *text = key ? value_of(known, value) : NULL;
    int failed = !text || PyDict_SetItem(headers, key, text) < 0;
    Py_XDECREF(key);
    Py_XDECREF(text);
    return failed ? FAILED : TAKEN;
}

/* The method and the target of a request line. */
static int take_request_line(Span line, PyObject **method, Span *target)
{
    const Py_ssize_t tail = (Py_ssize_t)strlen(" HTTP/1.1");
    for (int i = 0; i < 4; i++) {
        Py_ssize_t size = (Py_ssize_t)strlen(METHODS[i]);
        if (line.size <= size + 1 + tail || memcmp(line.at, METHODS[i], (size_t)size) || line.at[size] != ' ')
            continue;
        *method = methods[i];
        target->at = line.at + size + 1;
        target->size = line.size - size - 1 - tail;
        return target->at[0] == '/' && all(*target, IN_TARGET) && !memcmp(line.at + line.size - tail, " HTTP/1.1", 9);
    }
    return 0;
}

static int size_of(PyObject *limits, int name, Py_ssize_t *size)
{
    PyObject *found = PyObject_GetAttr(limits, name_of[name]);
    if (!found)
        return -1;
    *size = PyLong_AsSsize_t(found);
    Py_DECREF(found);
    return *size == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Twin: veilmq.server.http.intake.plain.read_plain(data, limits, peer, secure, next_id). Constants: Request. */
FUNCTION(accel_read_plain)
{
    Py_ssize_t header_bytes_max, header_count_max, body_bytes_max, lines = 0;
    REQUIRE_ARGUMENTS("read_plain", 5);
    if (!PyBytes_CheckExact(args[0]))
        Py_RETURN_NONE;
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    const Py_ssize_t size = PyBytes_GET_SIZE(args[0]);
    const uint8_t *head_end = memmem(data, (size_t)size, "\r\n\r\n", 4);
    if (!head_end)
        Py_RETURN_NONE;
    if (size_of(args[1], HEADER_BYTES_MAX, &header_bytes_max) || size_of(args[1], HEADER_COUNT_MAX, &header_count_max)
        || size_of(args[1], BODY_BYTES_MAX, &body_bytes_max))
        return NULL;
    const Py_ssize_t head_size = head_end - data, body_size = size - head_size - 4;
    if (head_size > header_bytes_max || body_size > body_bytes_max)
        Py_RETURN_NONE;
    PyObject *method, *headers, *request = NULL;
    const uint8_t *line_end = memmem(data, (size_t)head_size + 2, "\r\n", 2); /* the head's end has one */
    Span target, line = {data, line_end - data}, length = {(const uint8_t *)"0", 1};
    if (!take_request_line(line, &method, &target))
        Py_RETURN_NONE;
    if (!(headers = PyDict_New()))
        return NULL;
    int has_host = 0, taken = TAKEN;
    while (line_end < head_end && taken == TAKEN) {
        line.at = line_end + 2;
        line_end = memmem(line.at, (size_t)(head_end + 2 - line.at), "\r\n", 2);
        line.size = line_end - line.at;
        taken = ++lines > header_count_max ? UNUSUAL : take_header(headers, line, &has_host, &length);
    }
    char written[24];
    int digits = snprintf(written, sizeof written, "%zd", body_size);
    if (taken == TAKEN && (PyDict_GET_SIZE(headers) != lines || !has_host || head_size + lines > header_bytes_max
                           || length.size != digits || memcmp(length.at, written, (size_t)digits)))
        taken = UNUSUAL;
    if (taken == TAKEN) {
        PyObject *path = PyBytes_FromStringAndSize((const char *)target.at, target.size);
        PyObject *body = PyBytes_FromStringAndSize((const char *)head_end + 4, body_size);
        PyObject *id = path && body ? PyObject_CallNoArgs(args[4]) : NULL;
        if (id) {
            PyObject *fields[] = {method, path, headers, body, args[2], args[3], id};
            request = PyObject_Vectorcall(CONSTANT(0), fields, 7, NULL);
        }
        Py_XDECREF(path);
        Py_XDECREF(body);
        Py_XDECREF(id);
    }
    Py_DECREF(headers);
    return taken == UNUSUAL ? Py_NewRef(Py_None) : request;
}
