/* SQS: the signature of a request, commands of plain entries, and answers in JSON. */

#include "accelerator.h"

#define SPAN(literal) ((Span){(const uint8_t *)(literal), (Py_ssize_t)sizeof(literal) - 1})
#define IS_BYTES(of) ((of) && PyBytes_CheckExact(of))

static void add(Sha256 *hash, Span some) { sha256_add(hash, some.at, (size_t)some.size); }

static void end_in_hex(Sha256 *hash, uint8_t hex[2 * SHA256_BYTES])
{
    uint8_t digest[SHA256_BYTES];
    sha256_end(hash, digest);
    write_hex(hex, digest, sizeof digest);
}

static void begin_mac(Sha256 *hash, Span key, uint8_t pad)
{
    uint8_t block[64] = {0};
    memcpy(block, key.at, (size_t)key.size);
    for (size_t i = 0; i < sizeof block; i++)
        block[i] ^= pad;
    sha256_begin(hash);
    sha256_add(hash, block, sizeof block);
}

/* The signature in hex of a POST to `/`. `rest` is the canonical request from its headers on, with `%b` for each value
 * and, at last, for the payload's hash; -1 if their number is another, or with an error. */
static int sign(Span key, Span stamp, Span scope, Span rest, PyObject *names, PyObject *headers, Span body,
                uint8_t hex[2 * SHA256_BYTES])
{
    Sha256 hash, outer;
    uint8_t digest[SHA256_BYTES];
    const uint8_t *found;
    Py_ssize_t taken = 0, many = PyTuple_GET_SIZE(names);
    sha256_begin(&hash);
    add(&hash, body);
    end_in_hex(&hash, hex);

    sha256_begin(&hash);
    add(&hash, SPAN("POST\n/\n\n"));
    for (; (found = memchr(rest.at, '%', (size_t)rest.size)) && found + 2 <= rest.at + rest.size; taken++) {
        add(&hash, (Span){rest.at, found - rest.at});
        rest.size -= found - rest.at + 2;
        rest.at = found + 2;
        PyObject *value = taken < many ? PyDict_GetItemWithError(headers, PyTuple_GET_ITEM(names, taken)) : NULL;
        if (taken > many || (taken < many && !(value && PyBytes_CheckExact(value))))
            return -1;
        add(&hash, value ? bytes_of(value) : (Span){hex, 2 * SHA256_BYTES});
    }
    if (taken != many + 1)
        return -1;
    add(&hash, rest);
    end_in_hex(&hash, hex);

    begin_mac(&hash, key, 0x36);
    begin_mac(&outer, key, 0x5c);
    add(&hash, SPAN("AWS4-HMAC-SHA256\n"));
    add(&hash, stamp);
    add(&hash, SPAN("\n"));
    add(&hash, scope);
    add(&hash, SPAN("\n"));
    add(&hash, (Span){hex, 2 * SHA256_BYTES});
    sha256_end(&hash, digest);
    sha256_add(&outer, digest, sizeof digest);
    end_in_hex(&outer, hex);
    return 0;
}

/* Whether the request has headers that were seen to have all that must be signed. */
static int is_known_shape(PyObject *shapes, PyObject *headers)
{
    PyObject *name, *value, *shape = PyTuple_New(PyDict_GET_SIZE(headers));
    Py_ssize_t at = 0, number = 0;
    while (shape && PyDict_Next(headers, &at, &name, &value))
        PyTuple_SET_ITEM(shape, number++, Py_NewRef(name));
    int known = shape ? PyDict_Contains(shapes, shape) : -1;
    Py_XDECREF(shape);
    return known;
}

/* Twin: Verifier.verify: plain_scheme(request, wall, schemes, stamps), the scheme by which a POST to `/` is signed now, of
 * which everything was seen before. Constants: Request, _Scheme, POST, SKEW_US, b"authorization", b"x-amz-date",
 * b"x-amz-security-token". */
FUNCTION(accel_plain_scheme)
{
    uint8_t hex[2 * SHA256_BYTES], differs = 0;
    REQUIRE_ARGUMENTS("plain_scheme", 4);
    PyObject *request = args[0], *headers, *target, *body;
    if (!is_a(request, CONSTANT(0)) || field(request, METHOD) != CONSTANT(2) || !is_none(request, AUTHORITY)
        || !(target = field(request, TARGET)) || !PyBytes_CheckExact(target) || PyBytes_GET_SIZE(target) != 1
        || *PyBytes_AS_STRING(target) != '/'
        || !(headers = field(request, HEADERS)) || !PyDict_CheckExact(headers)
        || !(body = field(request, BODY)) || !PyBytes_CheckExact(body)
        || PyDict_Contains(headers, CONSTANT(6)))
        return none_unless_failed();
    PyObject *given = PyDict_GetItemWithError(headers, CONSTANT(4)), *stamp = PyDict_GetItemWithError(headers, CONSTANT(5));
    if (!given || !stamp || !PyBytes_CheckExact(given) || !PyBytes_CheckExact(stamp)
        || PyBytes_GET_SIZE(given) <= 2 * SHA256_BYTES || PyBytes_GET_SIZE(stamp) < 8)
        return none_unless_failed();
    Py_ssize_t size = PyBytes_GET_SIZE(given) - 2 * SHA256_BYTES;
    PyObject *prefix = PyBytes_FromStringAndSize(PyBytes_AS_STRING(given), size);
    PyObject *scheme = prefix ? PyDict_GetItemWithError(args[2], prefix) : NULL;
    PyObject *seconds = scheme ? PyDict_GetItemWithError(args[3], stamp) : NULL;
    Py_XDECREF(prefix);
    if (!seconds || !is_a(scheme, CONSTANT(1)) || field(scheme, KNOWN) != Py_True)
        return none_unless_failed();
    PyObject *day = field(scheme, DAY), *scope = field(scheme, SCOPE), *rest = field(scheme, REST);
    PyObject *key = field(scheme, SIGNING_KEY), *names = field(scheme, SIGNED), *shapes = field(scheme, SHAPES);
    long long skew = PyLong_AsLongLong(args[1]) - PyLong_AsLongLong(seconds) * 1000000, most = PyLong_AsLongLong(CONSTANT(3));
    if (PyErr_Occurred() || skew < -most || skew > most || !IS_BYTES(day) || !IS_BYTES(scope) || !IS_BYTES(rest)
        || !IS_BYTES(key) || !names || !PyTuple_CheckExact(names) || !shapes || !PyDict_Check(shapes)
        || PyBytes_GET_SIZE(day) != 8 || memcmp(PyBytes_AS_STRING(day), PyBytes_AS_STRING(stamp), 8)
        || PyBytes_GET_SIZE(key) != SHA256_BYTES || is_known_shape(shapes, headers) != 1
        || sign(bytes_of(key), bytes_of(stamp), bytes_of(scope), bytes_of(rest), names, headers, bytes_of(body), hex))
        return none_unless_failed();
    for (int i = 0; i < 2 * SHA256_BYTES; i++) /* as long for every signature */
        differs |= hex[i] ^ (uint8_t)PyBytes_AS_STRING(given)[size + i];
    return Py_NewRef(differs ? Py_None : scheme);
}

/* --- Commands --- */

#define ENTRIES_MAX 10
#define MESSAGE_BYTES_MAX 1048576

/* ASCII text, borrowed from the str; at is NULL for any other value. */
static Span ascii_of(PyObject *text)
{
    Span span = {NULL, 0};
    if (text && PyUnicode_CheckExact(text) && PyUnicode_IS_COMPACT_ASCII(text)) {
        span.at = PyUnicode_1BYTE_DATA(text);
        span.size = PyUnicode_GET_LENGTH(text);
    }
    return span;
}

/* Twin: veilmq.model.messages.is_plain. */
static int is_plain(Span text)
{
    uint8_t odd = 0;
    for (Py_ssize_t i = 0; i < text.size; i++) {
        uint8_t c = text.at[i];
        odd |= (uint8_t)(((c < ' ') & (c != '\t') & (c != '\n') & (c != '\r')) | (c >= 0x7f));
    }
    return !odd;
}

/* limits.ENTRY_ID */
static int is_entry_id(Span id)
{
    if (!id.at || id.size < 1 || id.size > 80)
        return 0;
    for (Py_ssize_t i = 0; i < id.size; i++)
        if (!Py_ISALNUM(id.at[i]) && id.at[i] != '_' && id.at[i] != '-')
            return 0;
    return 1;
}

/* A new Send of a plain message of at most `left` bytes, which become fewer; NULL without an error if it is not plain. */
static PyObject *send_of(PyObject *send, PyObject *no_extras, PyObject *given, PyObject *queue, PyObject *origin,
                         Py_ssize_t *left)
{
    uint8_t digest[MD5_BYTES];
    PyObject *body = field(given, MESSAGE_BODY);
    Span text = ascii_of(body);
    if (!text.at || !text.size || text.size > *left || !is_none(given, DELAY_SECONDS)
        || !is_none(given, MESSAGE_ATTRIBUTES) || !is_none(given, MESSAGE_SYSTEM_ATTRIBUTES)
        || !is_none(given, MESSAGE_DEDUPLICATION_ID) || !is_none(given, MESSAGE_GROUP_ID) || !is_plain(text))
        return NULL;
    *left -= text.size;
    md5(text.at, (size_t)text.size, digest);
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
    PyObject *number = bytes ? PyLong_FromSsize_t(text.size) : NULL;
    PyObject *made = NULL;
    if (number) {
        PyObject *fields[] = {queue, origin, body, bytes, number, no_extras};
        made = PyObject_Vectorcall(send, fields, 0, send_keywords);
    }
    Py_XDECREF(bytes);
    Py_XDECREF(number);
    return made;
}

/* Twin: veilmq.protocols.sqs.operations.messages._send of a plain message: plain_send(given, queue, origin).
 * Constants: Send, NO_EXTRAS, SendMessageInput. */
FUNCTION(accel_plain_send)
{
    Py_ssize_t left = MESSAGE_BYTES_MAX;
    REQUIRE_ARGUMENTS("plain_send", 3);
    if (!is_a(args[0], CONSTANT(2)))
        Py_RETURN_NONE;
    PyObject *made = send_of(CONSTANT(0), CONSTANT(1), args[0], args[1], args[2], &left);
    return made ? made : none_unless_failed();
}

/* The ids of a batch: each valid and unlike the ones before. */
static int take_id(Span *ids, Py_ssize_t number, PyObject *id)
{
    Span text = ids[number] = ascii_of(id);
    if (!is_entry_id(text))
        return 0;
    for (Py_ssize_t i = 0; i < number; i++)
        if (ids[i].size == text.size && !memcmp(ids[i].at, text.at, (size_t)text.size))
            return 0;
    return 1;
}

/* A tuple of (commands, entries) with room for the entries given; NULL without an error if they are not plain. */
static PyObject *planned(PyObject *given)
{
    if (!PyList_CheckExact(given) || !PyList_GET_SIZE(given) || PyList_GET_SIZE(given) > ENTRIES_MAX)
        return NULL;
    PyObject *commands = PyTuple_New(PyList_GET_SIZE(given)), *entries = PyList_New(PyList_GET_SIZE(given));
    PyObject *plan = commands && entries ? PyTuple_Pack(2, commands, entries) : NULL;
    Py_XDECREF(commands);
    Py_XDECREF(entries);
    return plan;
}

static int put(PyObject *plan, Py_ssize_t at, PyObject *entry_type, PyObject *id, PyObject *command)
{
    PyObject *number = PyLong_FromSsize_t(at);
    PyObject *fields[] = {id, number};
    PyObject *entry = number ? PyObject_Vectorcall(entry_type, fields, 2, NULL) : NULL;
    Py_XDECREF(number);
    PyTuple_SET_ITEM(PyTuple_GET_ITEM(plan, 0), at, command);
    if (!entry)
        return -1;
    PyList_SET_ITEM(PyTuple_GET_ITEM(plan, 1), at, entry);
    return 0;
}

/* Twin: plan_send_batch of plain messages: plain_sends(entries, queue, origin).
 * Constants: Send, NO_EXTRAS, SendEntry, Entry. */
FUNCTION(accel_plain_sends)
{
    Span ids[ENTRIES_MAX];
    Py_ssize_t left = MESSAGE_BYTES_MAX;
    REQUIRE_ARGUMENTS("plain_sends", 3);
    PyObject *given = args[0], *plan = planned(given);
    for (Py_ssize_t i = 0; plan && i < PyList_GET_SIZE(given); i++) {
        PyObject *entry = PyList_GET_ITEM(given, i), *command = NULL;
        if (is_a(entry, CONSTANT(2)) && take_id(ids, i, field(entry, ID)))
            command = send_of(CONSTANT(0), CONSTANT(1), entry, args[1], args[2], &left);
        if (!command || put(plan, i, CONSTANT(3), field(entry, ID), command) < 0)
            Py_CLEAR(plan);
    }
    return plan ? plan : none_unless_failed();
}

/* Twin: plan_delete_batch: plain_deletes(entries, queue, origin, arrived, after_expiry).
 * Constants: Delete, DeleteEntry, Entry. */
FUNCTION(accel_plain_deletes)
{
    Span ids[ENTRIES_MAX];
    REQUIRE_ARGUMENTS("plain_deletes", 5);
    PyObject *given = args[0], *plan = planned(given);
    for (Py_ssize_t i = 0; plan && i < PyList_GET_SIZE(given); i++) {
        PyObject *entry = PyList_GET_ITEM(given, i), *command = NULL;
        if (is_a(entry, CONSTANT(1)) && take_id(ids, i, field(entry, ID))) {
            PyObject *handle = field(entry, RECEIPT_HANDLE);
            if (handle && PyUnicode_CheckExact(handle) && PyUnicode_GET_LENGTH(handle)) {
                PyObject *fields[] = {args[1], args[2], handle, args[3], args[4]};
                command = PyObject_Vectorcall(CONSTANT(0), fields, 0, delete_keywords);
            }
        }
        if (!command || put(plan, i, CONSTANT(2), field(entry, ID), command) < 0)
            Py_CLEAR(plan);
    }
    return plan ? plan : none_unless_failed();
}

/* --- Answers in JSON. Twin of each: json_form.write of what the operation answers. --- */

/* Writes if `to` is set; otherwise only counts. */
typedef struct {
    uint8_t *to;
    Py_ssize_t size;
} Text;

static void put_bytes(Text *text, const void *from, Py_ssize_t size)
{
    if (text->to)
        memcpy(text->to + text->size, from, (size_t)size);
    text->size += size;
}

#define PUT(text, literal) put_bytes(text, literal, (Py_ssize_t)sizeof literal - 1)

static void put_hex(Text *text, Span bytes)
{
    if (text->to)
        write_hex(text->to + text->size, bytes.at, (size_t)bytes.size);
    text->size += 2 * bytes.size;
}

/* Twin: id_text. */
static void put_uuid(Text *text, Span id)
{
    static const uint8_t ends[] = {4, 6, 8, 10, 16};
    for (int i = 0, at = 0; i < 5; at = ends[i++]) {
        if (i)
            PUT(text, "-");
        put_hex(text, (Span){id.at + at, ends[i] - at});
    }
}

/* UTF-8 as the text of a JSON string, escaped as msgspec does it. */
static void put_escaped(Text *text, Span utf8)
{
    static const char short_escapes[32] = {[8] = 'b', [9] = 't', [10] = 'n', [12] = 'f', [13] = 'r'};
    Py_ssize_t begin = 0;
    uint8_t odd = 0; /* most texts have nothing to escape: that is seen many bytes at a time */
    for (Py_ssize_t i = 0; i < utf8.size; i++)
        odd |= (uint8_t)((utf8.at[i] < ' ') | (utf8.at[i] == '"') | (utf8.at[i] == '\\'));
    for (Py_ssize_t i = 0; odd && i < utf8.size; i++) {
        uint8_t c = utf8.at[i];
        if (c >= ' ' && c != '"' && c != '\\')
            continue;
        put_bytes(text, utf8.at + begin, i - begin);
        begin = i + 1;
        uint8_t escape[6] = {'\\', c};
        if (c >= ' ' || short_escapes[c]) {
            escape[1] = c >= ' ' ? c : (uint8_t)short_escapes[c];
            put_bytes(text, escape, 2);
        } else {
            memcpy(escape, "\\u00", 4);
            write_hex(escape + 4, &c, 1);
            put_bytes(text, escape, 6);
        }
    }
    put_bytes(text, utf8.at + begin, utf8.size - begin);
}

/* Bytes of exactly that size in a field; at is NULL for any other value. */
static Span exactly(PyObject *from, int name, Py_ssize_t size)
{
    PyObject *found = field(from, name);
    return found && PyBytes_CheckExact(found) && PyBytes_GET_SIZE(found) == size ? bytes_of(found) : (Span){NULL, 0};
}

/* The MD5 of the body in a plain Send and the id in its Sent. */
static int read_sent(PyObject *bound, PyObject *command, PyObject *outcome, Span *digest, Span *id)
{
    if (!is_a(command, CONSTANT(0)) || !is_a(outcome, CONSTANT(1))
        || field(command, EXTRAS) != CONSTANT(2))
        return 0;
    *digest = exactly(command, MD5, MD5_BYTES);
    *id = exactly(outcome, ID, 16);
    return digest->at && id->at;
}

/* The outcomes of the right number, as a list; 0 for anything else. */
static int are_of(PyObject *outcomes, PyObject *commands)
{
    return PyList_CheckExact(outcomes) && PyTuple_CheckExact(commands)
           && PyList_GET_SIZE(outcomes) == PyTuple_GET_SIZE(commands);
}

/* SendMessage: sent_json(commands, outcomes). Constants: Send, Sent, NO_EXTRAS. */
FUNCTION(accel_sent_json)
{
    Span digest, id;
    uint8_t buffer[128];
    Text text = {buffer, 0};
    REQUIRE_ARGUMENTS("sent_json", 2);
    if (!are_of(args[1], args[0]) || PyList_GET_SIZE(args[1]) != 1
        || !read_sent(bound, PyTuple_GET_ITEM(args[0], 0), PyList_GET_ITEM(args[1], 0), &digest, &id))
        return none_unless_failed();
    PUT(&text, "{\"MD5OfMessageBody\":\"");
    put_hex(&text, digest);
    PUT(&text, "\",\"MessageId\":\"");
    put_uuid(&text, id);
    PUT(&text, "\"}");
    return PyBytes_FromStringAndSize((const char *)buffer, text.size);
}

/* The id of an entry that is command `at` and was not refused. */
static int read_entry(PyObject *entry_type, PyObject *entry, Py_ssize_t at, Span *id)
{
    PyObject *number;
    if (!is_a(entry, entry_type) || !is_none(entry, REFUSAL) || !(number = field(entry, COMMAND))
        || !PyLong_CheckExact(number) || PyLong_AsSsize_t(number) != at)
        return 0;
    *id = ascii_of(field(entry, ID));
    return is_entry_id(*id);
}

#define ENTRY_BYTES_MAX 256 /* in an answer: an id of 80, a digest of 32, a message id of 36, and names */

/* SendMessageBatch and DeleteMessageBatch: entries_json(entries, commands, outcomes).
 * Constants: Send, Sent, NO_EXTRAS, Entry, Deleted. */
FUNCTION(accel_entries_json)
{
    Span name, digest, id;
    uint8_t buffer[ENTRIES_MAX * ENTRY_BYTES_MAX + 32];
    Text text = {buffer, 0};
    REQUIRE_ARGUMENTS("entries_json", 3);
    PyObject *entries = args[0], *commands = args[1], *outcomes = args[2];
    if (!are_of(outcomes, commands) || !PyList_CheckExact(entries) || !PyList_GET_SIZE(entries)
        || PyList_GET_SIZE(entries) > ENTRIES_MAX || PyList_GET_SIZE(entries) != PyList_GET_SIZE(outcomes))
        Py_RETURN_NONE;
    PUT(&text, "{\"Successful\":[");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        PyObject *outcome = PyList_GET_ITEM(outcomes, i);
        int is_sent = read_sent(bound, PyTuple_GET_ITEM(commands, i), outcome, &digest, &id);
        if ((!is_sent && !is_a(outcome, CONSTANT(4))) || !read_entry(CONSTANT(3), PyList_GET_ITEM(entries, i), i, &name))
            return none_unless_failed();
        if (i)
            PUT(&text, ",");
        PUT(&text, "{\"Id\":\"");
        put_bytes(&text, name.at, name.size);
        if (is_sent) {
            PUT(&text, "\",\"MessageId\":\"");
            put_uuid(&text, id);
            PUT(&text, "\",\"MD5OfMessageBody\":\"");
            put_hex(&text, digest);
        }
        PUT(&text, "\"}");
    }
    PUT(&text, "]}");
    return PyBytes_FromStringAndSize((const char *)buffer, text.size);
}

static int put_delivery(PyObject *delivery_type, PyObject *delivery, Text *text)
{
    if (!is_a(delivery, delivery_type))
        return 0;
    Span id = exactly(delivery, ID, 16), digest = exactly(delivery, MD5, MD5_BYTES);
    Span handle = ascii_of(field(delivery, HANDLE)), body;
    PyObject *words = field(delivery, BODY);
    if (!id.at || !digest.at || !handle.at || !words || !PyUnicode_CheckExact(words)
        || !(body.at = (const uint8_t *)PyUnicode_AsUTF8AndSize(words, &body.size)))
        return 0;
    PUT(text, "{\"MessageId\":\"");
    put_uuid(text, id);
    PUT(text, "\",\"ReceiptHandle\":\"");
    put_escaped(text, handle);
    PUT(text, "\",\"MD5OfBody\":\"");
    put_hex(text, digest);
    PUT(text, "\",\"Body\":\"");
    put_escaped(text, body);
    PUT(text, "\"}");
    return 1;
}

/* ReceiveMessage without attributes: received_json(messages). Constants: Delivery. */
FUNCTION(accel_received_json)
{
    Text text = {NULL, 0};
    PyObject *answer = NULL;
    REQUIRE_ARGUMENTS("received_json", 1);
    if (!PyList_CheckExact(args[0]) || !PyList_GET_SIZE(args[0]))
        Py_RETURN_NONE;
    for (int writing = 0; writing < 2; writing++) { /* the first time only counts */
        text.size = 0;
        PUT(&text, "{\"Messages\":[");
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
            if (i)
                PUT(&text, ",");
            if (!put_delivery(CONSTANT(0), PyList_GET_ITEM(args[0], i), &text)) {
                Py_XDECREF(answer);
                return none_unless_failed();
            }
        }
        PUT(&text, "]}");
        if (!writing) {
            if (!(answer = PyBytes_FromStringAndSize(NULL, text.size)))
                return NULL;
            text.to = (uint8_t *)PyBytes_AS_STRING(answer);
        }
    }
    return answer;
}
