/* Passes the plain middle of streamed answers from an engine's socket to a client's.
 *
 * One thread, outside the interpreter: what it does needs no Python object and no lock of
 * Python's. It knows one thing only, whole chunks of HTTP/1.1's chunked framing that hold whole
 * server-sent events with none of the given marks in them; those go on byte for byte, framing
 * included. Anything else (a mark, another framing, the end, a client that does not keep up) ends
 * the splice, and Python gets the stream back with every byte that was not passed on.
 *
 * The sockets are duplicated, so that no number can come to mean another connection.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define INPUT_BYTES (64 << 10) /* Chunks larger than this are Python's. */
#define MOST_STREAMS (1 << 16)
#define MOST_MARKS 16
#define BATCH 256
#define MOST_REPORTS 16 /* Reports' worth of events that may wait for Python to ask. */
#define CLOSING UINT64_MAX

enum reason {
    RUNNING = 0,
    MARKED = 1,
    BLOCKED = 2,
    CLIENT_GONE = 3,
    ENGINE_ENDED = 4,
    UNHEARD = 5,
};

typedef struct {
    unsigned char *data;
    size_t size, room;
} Bytes;

typedef struct {
    pthread_mutex_t lock;
    uint32_t generation; /* Counts uses of the slot; even: nobody has it. */
    enum reason reason;
    int source, target;
    bool keep, told;
    Bytes rest;   /* Read and not passed on: the start of a chunk, or what ended the splice. */
    Bytes unsent; /* To be sent before anything else. */
    Bytes seen;   /* Events passed on that Python has not been told of. */
    struct timespec heard;
    int mark_count;
    Bytes marks[MOST_MARKS];
} Stream;

typedef struct {
    PyObject_HEAD
    pthread_t thread;
    bool runs;
    int epoll, closing, news;
    size_t report_bytes;
    Stream *streams[MOST_STREAMS]; /* A slot is made once and used again and again. */
    uint32_t made, free_count;
    uint32_t *free_slots; /* Python's side alone takes and gives them, under the GIL. */
    pthread_mutex_t told_lock;
    uint64_t *told; /* Streams that Python is to look at. */
    size_t told_count, told_room;
    unsigned char *input;
} Splicer;

/* Bytes. */

static bool append(Bytes *to, const void *data, size_t size)
{
    if (size == 0) /* Then there need be no memory to copy from or to. */
        return true;
    if (to->size + size > to->room) {
        size_t room = to->room ? to->room * 2 : 4096;
        while (room < to->size + size)
            room *= 2;
        unsigned char *grown = realloc(to->data, room);
        if (grown == NULL)
            return false;
        to->data = grown;
        to->room = room;
    }
    memcpy(to->data + to->size, data, size);
    to->size += size;
    return true;
}

static void discard(Bytes *bytes)
{
    free(bytes->data);
    *bytes = (Bytes){0};
}

static uint64_t id_of(uint32_t slot, uint32_t generation)
{
    return (uint64_t)slot << 32 | generation;
}

/* The stream of an id, locked; NULL if it is over. */
static Stream *find(Splicer *self, uint64_t id)
{
    uint32_t slot = id >> 32;
    Stream *stream = slot < MOST_STREAMS ? self->streams[slot] : NULL;
    if (stream == NULL)
        return NULL;
    pthread_mutex_lock(&stream->lock);
    if (stream->generation == (uint32_t)id && stream->generation % 2)
        return stream;
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

/* What the thread does. Its functions have the stream's lock. */

static void tell(Splicer *self, Stream *stream, uint64_t id)
{
    if (stream->told)
        return;
    pthread_mutex_lock(&self->told_lock);
    if (self->told_count == self->told_room) {
        size_t room = self->told_room ? self->told_room * 2 : 256;
        uint64_t *grown = realloc(self->told, room * sizeof *grown);
        if (grown == NULL) { /* The next event of the stream tries again. */
            pthread_mutex_unlock(&self->told_lock);
            return;
        }
        self->told = grown;
        self->told_room = room;
    }
    self->told[self->told_count++] = id;
    pthread_mutex_unlock(&self->told_lock);
    stream->told = true;
    uint64_t one = 1;
    ssize_t written = write(self->news, &one, sizeof one);
    (void)written; /* A counter that is full wakes its reader as well. */
}

static void close_sockets(Splicer *self, Stream *stream)
{
    epoll_ctl(self->epoll, EPOLL_CTL_DEL, stream->source, NULL);
    close(stream->source);
    close(stream->target);
}

static void give_back(Splicer *self, Stream *stream, uint64_t id, enum reason reason)
{
    stream->reason = reason;
    close_sockets(self, stream);
    tell(self, stream, id);
}

static int hex_digit(unsigned char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The chunk at the start of data: its size with framing; 0: it is not whole yet; -1: it is none
 * that can be passed on. Its payload goes to *body, *body_size. */
static ssize_t whole_chunk(const unsigned char *data, size_t size, const unsigned char **body,
                           size_t *body_size)
{
    size_t length = 0, at = 0;
    int digit;
    while (at < size && (digit = hex_digit(data[at])) >= 0) {
        length = length * 16 + digit;
        if (++at > 5 || length > INPUT_BYTES - 16)
            return -1;
    }
    if (at == size || (at && at + 1 == size && data[at] == '\r'))
        return 0;
    if (!length || data[at] != '\r' || data[at + 1] != '\n')
        return -1;
    size_t whole = at + 2 + length + 2;
    if (size < whole)
        return 0;
    if (data[whole - 2] != '\r' || data[whole - 1] != '\n')
        return -1;
    *body = data + at + 2;
    *body_size = length;
    return whole;
}

static bool plain(const Stream *stream, const unsigned char *body, size_t size)
{
    if (size < 2 || body[size - 1] != '\n' || body[size - 2] != '\n')
        return false;
    for (int i = 0; i < stream->mark_count; i++)
        if (memmem(body, size, stream->marks[i].data, stream->marks[i].size) != NULL)
            return false;
    return true;
}

/* Read once and pass on what is plain. */
static void pass(Splicer *self, Stream *stream, uint64_t id)
{
    unsigned char *input = self->input;
    size_t size = stream->rest.size;
    if (size >= INPUT_BYTES) {
        give_back(self, stream, id, MARKED);
        return;
    }
    ssize_t got = recv(stream->source, input + size, INPUT_BYTES - size, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (got <= 0) {
        give_back(self, stream, id, ENGINE_ENDED);
        return;
    }
    if (size)
        memcpy(input, stream->rest.data, size);
    stream->rest.size = 0;
    size += got;
    clock_gettime(CLOCK_MONOTONIC, &stream->heard);

    size_t passed = 0, noted = stream->seen.size;
    enum reason reason = RUNNING;
    while (passed < size) {
        const unsigned char *body;
        size_t body_size;
        ssize_t chunk = whole_chunk(input + passed, size - passed, &body, &body_size);
        if (chunk == 0)
            break;
        if (chunk < 0 || !plain(stream, body, body_size)
            || (stream->keep && !append(&stream->seen, body, body_size))) {
            reason = MARKED;
            break;
        }
        passed += chunk;
    }
    size_t sent = 0;
    while (sent < passed) {
        ssize_t some =
            send(stream->target, input + sent, passed - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (some >= 0)
            sent += some;
        else if (errno != EINTR) {
            reason = errno == EAGAIN || errno == EWOULDBLOCK ? BLOCKED : CLIENT_GONE;
            break;
        }
    }
    bool kept = append(&stream->rest, input + passed, size - passed)
                && append(&stream->unsent, input + sent, passed - sent);
    if (!kept) /* Without memory no byte may be missed: the client sees a broken stream. */
        reason = CLIENT_GONE;
    if (reason == RUNNING && stream->seen.size / MOST_REPORTS >= self->report_bytes)
        reason = UNHEARD; /* Else a fast engine would fill the memory. */
    if (reason != RUNNING)
        give_back(self, stream, id, reason);
    else if (stream->seen.size >= self->report_bytes && stream->seen.size > noted)
        tell(self, stream, id);
}

static void *work(void *argument)
{
    Splicer *self = argument;
    struct epoll_event events[BATCH];
    for (;;) {
        int count = epoll_wait(self->epoll, events, BATCH, -1);
        for (int i = 0; i < count; i++) {
            uint64_t id = events[i].data.u64;
            if (id == CLOSING)
                return NULL;
            Stream *stream = find(self, id);
            if (stream == NULL)
                continue;
            if (stream->reason == RUNNING)
                pass(self, stream, id);
            pthread_mutex_unlock(&stream->lock);
        }
    }
}

/* What Python calls. */

static void release_slot(Splicer *self, Stream *stream, uint32_t slot)
{
    stream->generation++;
    discard(&stream->rest);
    discard(&stream->unsent);
    discard(&stream->seen);
    for (int i = 0; i < stream->mark_count; i++)
        discard(&stream->marks[i]);
    stream->mark_count = 0;
    self->free_slots[self->free_count++] = slot;
}

/* (id, reason, unsent, rest, seen); the slot is free afterwards unless the stream still runs.
 * Unlocks the stream. */
static PyObject *report(Splicer *self, Stream *stream, uint64_t id, bool running)
{
    Bytes unsent = {0}, rest = {0}, seen = stream->seen;
    stream->seen = (Bytes){0};
    stream->told = false;
    if (!running) {
        unsent = stream->unsent;
        rest = stream->rest;
        stream->unsent = stream->rest = (Bytes){0};
    }
    int reason = stream->reason;
    if (!running)
        release_slot(self, stream, id >> 32);
    pthread_mutex_unlock(&stream->lock);
    PyObject *result = Py_BuildValue(
        "Kiy#y#y#", (unsigned long long)id, reason, unsent.data ? (char *)unsent.data : "",
        (Py_ssize_t)unsent.size, rest.data ? (char *)rest.data : "", (Py_ssize_t)rest.size,
        seen.data ? (char *)seen.data : "", (Py_ssize_t)seen.size);
    discard(&unsent);
    discard(&rest);
    discard(&seen);
    return result;
}

static int duplicate(int fd)
{
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

static bool copy_marks(Stream *stream, PyObject *marks)
{
    Py_ssize_t count = PyTuple_GET_SIZE(marks);
    if (count > MOST_MARKS) {
        PyErr_Format(PyExc_ValueError, "more than %d marks", MOST_MARKS);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        char *data;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(marks, i), &data, &size) < 0)
            return false;
        if (size == 0) {
            PyErr_SetString(PyExc_ValueError, "an empty mark");
            return false;
        }
        if (!append(&stream->marks[i], data, size)) {
            PyErr_NoMemory();
            return false;
        }
        stream->mark_count = (int)i + 1;
    }
    return true;
}

/* A slot for one more stream; -1 with an exception if there is none. */
static int64_t take_slot(Splicer *self)
{
    if (self->free_count)
        return self->free_slots[--self->free_count];
    if (self->made == MOST_STREAMS) {
        PyErr_SetString(PyExc_OSError, "too many streams");
        return -1;
    }
    Stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    pthread_mutex_init(&stream->lock, NULL);
    self->streams[self->made] = stream;
    return self->made++;
}

static PyObject *splicer_add(Splicer *self, PyObject *args)
{
    int source, target, keep;
    PyObject *marks;
    if (!PyArg_ParseTuple(args, "iiO!p", &source, &target, &PyTuple_Type, &marks, &keep))
        return NULL;
    if (!self->runs) {
        PyErr_SetString(PyExc_ValueError, "the splicer is closed");
        return NULL;
    }
    int64_t slot = take_slot(self);
    if (slot < 0)
        return NULL;
    Stream *stream = self->streams[slot];
    pthread_mutex_lock(&stream->lock);
    stream->generation++;
    uint64_t id = id_of(slot, stream->generation);
    stream->reason = RUNNING;
    stream->keep = keep;
    stream->told = false;
    stream->source = stream->target = -1;
    clock_gettime(CLOCK_MONOTONIC, &stream->heard);
    bool made = copy_marks(stream, marks);
    if (made) {
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = id};
        stream->source = duplicate(source);
        stream->target = duplicate(target);
        made = stream->source >= 0 && stream->target >= 0
               && epoll_ctl(self->epoll, EPOLL_CTL_ADD, stream->source, &event) == 0;
        if (!made) {
            PyErr_SetFromErrno(PyExc_OSError);
            if (stream->source >= 0)
                close(stream->source);
            if (stream->target >= 0)
                close(stream->target);
        }
    }
    if (!made)
        release_slot(self, stream, slot);
    pthread_mutex_unlock(&stream->lock);
    return made ? PyLong_FromUnsignedLongLong(id) : NULL;
}

static bool id_argument(PyObject *argument, uint64_t *id)
{
    *id = PyLong_AsUnsignedLongLong(argument);
    return !PyErr_Occurred();
}

static PyObject *splicer_stop(Splicer *self, PyObject *argument)
{
    uint64_t id;
    if (!id_argument(argument, &id))
        return NULL;
    Stream *stream = find(self, id);
    if (stream == NULL)
        Py_RETURN_NONE;
    if (stream->reason == RUNNING)
        close_sockets(self, stream);
    return report(self, stream, id, false);
}

static PyObject *splicer_take(Splicer *self, PyObject *Py_UNUSED(ignored))
{
    uint64_t count;
    ssize_t got = read(self->news, &count, sizeof count);
    (void)got;
    pthread_mutex_lock(&self->told_lock);
    uint64_t *told = self->told;
    size_t told_count = self->told_count;
    self->told = NULL;
    self->told_count = self->told_room = 0;
    pthread_mutex_unlock(&self->told_lock);
    PyObject *reports = PyList_New(0);
    for (size_t i = 0; reports != NULL && i < told_count; i++) {
        Stream *stream = find(self, told[i]);
        if (stream == NULL) /* Python has stopped it meanwhile. */
            continue;
        PyObject *one = report(self, stream, told[i], stream->reason == RUNNING);
        if (one == NULL || PyList_Append(reports, one) < 0)
            Py_CLEAR(reports);
        Py_XDECREF(one);
    }
    free(told);
    return reports;
}

static PyObject *splicer_silence(Splicer *self, PyObject *argument)
{
    uint64_t id;
    if (!id_argument(argument, &id))
        return NULL;
    Stream *stream = find(self, id);
    if (stream == NULL)
        return PyFloat_FromDouble(Py_HUGE_VAL);
    struct timespec heard = stream->heard, now;
    pthread_mutex_unlock(&stream->lock);
    clock_gettime(CLOCK_MONOTONIC, &now);
    return PyFloat_FromDouble((double)(now.tv_sec - heard.tv_sec)
                              + (double)(now.tv_nsec - heard.tv_nsec) / 1e9);
}

static PyObject *splicer_fileno(Splicer *self, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromLong(self->news);
}

static void end_thread(Splicer *self)
{
    if (!self->runs)
        return;
    self->runs = false;
    uint64_t one = 1;
    ssize_t written = write(self->closing, &one, sizeof one);
    (void)written;
    Py_BEGIN_ALLOW_THREADS
    pthread_join(self->thread, NULL);
    Py_END_ALLOW_THREADS
    for (uint32_t slot = 0; slot < self->made; slot++) {
        Stream *stream = self->streams[slot];
        if (stream->generation % 2) {
            if (stream->reason == RUNNING)
                close_sockets(self, stream);
            release_slot(self, stream, slot);
        }
    }
}

static PyObject *splicer_close(Splicer *self, PyObject *Py_UNUSED(ignored))
{
    end_thread(self);
    Py_RETURN_NONE;
}

static void splicer_dealloc(Splicer *self)
{
    PyTypeObject *type = Py_TYPE(self);
    end_thread(self);
    for (uint32_t slot = 0; slot < self->made; slot++) {
        pthread_mutex_destroy(&self->streams[slot]->lock);
        free(self->streams[slot]);
    }
    int fds[] = {self->epoll, self->closing, self->news};
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    free(self->free_slots);
    free(self->told);
    free(self->input);
    pthread_mutex_destroy(&self->told_lock);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *splicer_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(named))
{
    Py_ssize_t report_bytes;
    if (!PyArg_ParseTuple(args, "n", &report_bytes))
        return NULL;
    if (report_bytes < 1) {
        PyErr_SetString(PyExc_ValueError, "report_bytes is less than 1");
        return NULL;
    }
    Splicer *self = (Splicer *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->report_bytes = report_bytes;
    pthread_mutex_init(&self->told_lock, NULL);
    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    self->closing = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self->news = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self->input = malloc(INPUT_BYTES);
    self->free_slots = malloc(MOST_STREAMS * sizeof *self->free_slots);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = CLOSING};
    if (self->input == NULL || self->free_slots == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    int failed = self->epoll < 0 || self->closing < 0 || self->news < 0
                 || epoll_ctl(self->epoll, EPOLL_CTL_ADD, self->closing, &event) < 0;
    if (!failed) {
        /* Signals are for the thread that has Python's handlers. */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        errno = pthread_create(&self->thread, NULL, work, self);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        failed = errno != 0;
        self->runs = !failed;
    }
    if (failed) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef splicer_methods[] = {
    {"add", (PyCFunction)splicer_add, METH_VARARGS,
     "add(source, target, marks, keep, /) -> int\n\n"
     "Pass on from one socket to the other; keep: tell what was passed on.\n"
     "Raises OSError if there is no room for it."},
    {"stop", (PyCFunction)splicer_stop, METH_O,
     "stop(id, /) -> tuple | None\n\n"
     "Pass on nothing more. What take() tells of a stream; None if it has told that it is over."},
    {"take", (PyCFunction)splicer_take, METH_NOARGS,
     "take() -> list\n\n"
     "(id, reason, unsent, rest, seen) of the streams that are over (reason is not 0) or have\n"
     "passed on much. unsent: bytes for the client; rest: bytes of the engine that come after."},
    {"silence", (PyCFunction)splicer_silence, METH_O,
     "silence(id, /) -> float\n\n"
     "Seconds since the engine sent anything; infinite if the stream is over."},
    {"fileno", (PyCFunction)splicer_fileno, METH_NOARGS,
     "fileno() -> int\n\nReadable when take() has something to tell."},
    {"close", (PyCFunction)splicer_close, METH_NOARGS, "close()\n\nEnd the thread."},
    {0},
};

static PyType_Slot splicer_slots[] = {
    {Py_tp_new, splicer_new},
    {Py_tp_dealloc, splicer_dealloc},
    {Py_tp_methods, splicer_methods},
    {Py_tp_doc, "Splicer(report_bytes, /)\n\nA thread that passes streams on."},
    {0},
};

static PyType_Spec splicer_spec = {
    .name = "pd_router._splice.Splicer",
    .basicsize = sizeof(Splicer),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = splicer_slots,
};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&splicer_spec);
    if (type == NULL || PyModule_AddObject(module, "Splicer", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    return PyModule_AddIntConstant(module, "MARKED", MARKED)
           || PyModule_AddIntConstant(module, "BLOCKED", BLOCKED)
           || PyModule_AddIntConstant(module, "CLIENT_GONE", CLIENT_GONE)
           || PyModule_AddIntConstant(module, "ENGINE_ENDED", ENGINE_ENDED)
           || PyModule_AddIntConstant(module, "UNHEARD", UNHEARD);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pd_router._splice",
    .m_doc = "Streams passed on by a thread of their own.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__splice(void)
{
    return PyModuleDef_Init(&module);
}
