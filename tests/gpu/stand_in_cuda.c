/* A stand-in for libcuda.so.1 over host memory: the functions that ptstore_mpi/cuda.py uses, and
 * what a test needs to look behind them.
 *
 * Stricter than a driver where a driver would let a bug pass by luck: a copy does nothing until its
 * stream is synchronized, device addresses cannot be read by the CPU, and what an engine has under
 * way is done only for streams that wait for it. Wrong uses fail with the driver's own errors.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
    CAPTURE_UNSUPPORTED = 900
};
enum { DEVICES = 2, MANY = 4096 };
enum { RELAXED = 2, PORTABLE = 1, NON_BLOCKING = 1, HOST = 1, DEVICE = 2 };

#define TAG ((uint64_t)1 << 60) /* device addresses are no addresses for the CPU */
#define LARGEST_PITCH 0x7fffffff

typedef struct {
    size_t x, y;
    unsigned type;
    void *host;
    uint64_t device;
    void *array;
    size_t pitch;
} Side;
typedef struct { Side from, to; size_t width, height; } Copy2D; /* CUDA_MEMCPY2D */
typedef struct {
    char *to;
    const char *from;
    size_t width, height, to_pitch, from_pitch;
    int wait; /* for so many writes of the engine */
} Work;
typedef struct { int device; int count; Work work[MANY]; } Stream;
typedef struct { char *start; size_t size; int device; } Range;
typedef struct { char *to; char *bytes; size_t size; } Write;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int contexts[16], depth;
static __thread unsigned capture_mode;
static int initialized, capturing, live_exports;
static Stream *streams[16];
static int stream_count;
static Range allocations[MANY], registered[64];
static int allocation_count, registered_count;
static Write writes[MANY]; /* of the engine */
static int write_count, written_count;
static struct { const char *name; int calls, fail_after, error; } functions[32];

/* -- helpers ------------------------------------------------------------------------------ */

static int slot_of(const char *name) {
    int i = 0;
    while (functions[i].name && strcmp(functions[i].name, name)) ++i;
    functions[i].name = name;
    return i;
}

static int entered(const char *name) {
    const int i = slot_of(name);
    ++functions[i].calls;
    if (functions[i].error && functions[i].fail_after-- <= 0) return functions[i].error;
    return initialized ? SUCCESS : NOT_INITIALIZED;
}

static int working(const char *name) {
    const int status = entered(name);
    if (status) return status;
    if (!depth) return INVALID_CONTEXT;
    return capturing && capture_mode != RELAXED ? CAPTURE_UNSUPPORTED : SUCCESS;
}

static Stream *stream_of(uint64_t handle) {
    for (int i = 0; i < stream_count; ++i)
        if ((uint64_t)streams[i] == handle) return streams[i];
    return NULL;
}

/* Bytes on the device of the current context, inside one allocation; NULL elsewhere. */
static char *on_device(uint64_t address, size_t size) {
    if (!(address & TAG)) return NULL;
    char *const start = (char *)(address - TAG);
    for (int i = 0; i < allocation_count; ++i) {
        const Range *r = &allocations[i];
        if (r->device != contexts[depth - 1]) continue;
        if (start >= r->start && start + size <= r->start + r->size) return start;
    }
    return NULL;
}

/* Bytes in host memory, page-locked in one piece or not at all. */
static char *in_host(const void *address, size_t size) {
    char *const start = (char *)address;
    if (!start || ((uint64_t)start & TAG)) return NULL;
    for (int i = 0; i < registered_count; ++i) {
        const Range *r = &registered[i];
        if (start + size <= r->start || start >= r->start + r->size) continue;
        if (start < r->start || start + size > r->start + r->size) return NULL;
    }
    return start;
}

static void write_until(int count) {
    for (; written_count < count; ++written_count) {
        memcpy(writes[written_count].to, writes[written_count].bytes, writes[written_count].size);
        free(writes[written_count].bytes);
    }
}

static int enqueue(uint64_t handle, Work work) {
    Stream *const stream = stream_of(handle);
    if (!stream || stream->device != contexts[depth - 1]) return INVALID_HANDLE;
    if (!work.to || !work.from || !work.width || !work.height) return INVALID_VALUE;
    if (stream->count == MANY) return OUT_OF_MEMORY;
    stream->work[stream->count++] = work;
    return SUCCESS;
}

#define LOCKED(call) \
    pthread_mutex_lock(&lock); \
    const int result = (call); \
    pthread_mutex_unlock(&lock); \
    return result

/* -- the driver --------------------------------------------------------------------------- */

int cuInit(unsigned flags) {
    initialized = 1;
    return flags ? INVALID_VALUE : entered("cuInit");
}

int cuGetErrorName(int error, const char **name) {
    static const struct { int error; const char *name; } names[] = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
        {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
    };
    for (unsigned i = 0; i < sizeof names / sizeof *names; ++i)
        if (names[i].error == error) return *name = names[i].name, SUCCESS;
    return *name = NULL, INVALID_VALUE;
}

int cuDeviceGet(int *device, int ordinal) {
    const int status = entered("cuDeviceGet");
    *device = ordinal + 100; /* a handle is not an ordinal */
    return status ? status : ordinal < 0 || ordinal >= DEVICES ? INVALID_DEVICE : SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    const int status = entered("cuDevicePrimaryCtxRetain");
    *context = (void *)(uint64_t)(device + 1000);
    return status ? status : device < 100 || device >= 100 + DEVICES ? INVALID_DEVICE : SUCCESS;
}

int cuCtxPushCurrent_v2(void *context) {
    const int device = (int)(uint64_t)context - 1100;
    if (device < 0 || device >= DEVICES || depth == 16) return INVALID_CONTEXT;
    contexts[depth++] = device;
    return entered("cuCtxPushCurrent_v2");
}

int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = (void *)(uint64_t)(contexts[--depth] + 1100);
    return SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    const unsigned before = capture_mode;
    if (*mode > RELAXED) return INVALID_VALUE;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

static int create(void **stream, unsigned flags) {
    const int status = working("cuStreamCreate");
    if (status) return status;
    if (flags != NON_BLOCKING || stream_count == 16) return INVALID_VALUE;
    Stream *const made = calloc(1, sizeof *made);
    made->device = contexts[depth - 1];
    *stream = streams[stream_count++] = made;
    return SUCCESS;
}
int cuStreamCreate(void **stream, unsigned flags) { LOCKED(create(stream, flags)); }

static int synchronize(void *handle) {
    const int status = working("cuStreamSynchronize");
    Stream *const stream = stream_of((uint64_t)handle);
    if (!stream) return INVALID_HANDLE;
    for (int i = 0; i < stream->count; ++i) {
        const Work *w = &stream->work[i];
        if (w->wait) write_until(w->wait);
        for (size_t y = 0; y < w->height; ++y)
            memcpy(w->to + y * w->to_pitch, w->from + y * w->from_pitch, w->width);
    }
    stream->count = 0;
    return status;
}
int cuStreamSynchronize(void *stream) { LOCKED(synchronize(stream)); }

static int to_device(uint64_t to, const void *from, size_t size, void *stream) {
    const int status = working("cuMemcpyHtoDAsync_v2");
    if (status) return status;
    const Work work = {on_device(to, size), in_host(from, size), size, 1, 0, 0, 0};
    return enqueue((uint64_t)stream, work);
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    LOCKED(to_device(to, from, size, stream));
}

static int to_host(void *to, uint64_t from, size_t size, void *stream) {
    const int status = working("cuMemcpyDtoHAsync_v2");
    if (status) return status;
    const Work work = {in_host(to, size), on_device(from, size), size, 1, 0, 0, 0};
    return enqueue((uint64_t)stream, work);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    LOCKED(to_host(to, from, size, stream));
}

static char *side(const Side *s, size_t width, size_t height) {
    if (s->x || s->y || s->array || !height) return NULL;
    if (s->pitch < width || s->pitch > LARGEST_PITCH) return NULL;
    const size_t size = (height - 1) * s->pitch + width;
    if (s->type == DEVICE && !s->host) return on_device(s->device, size);
    return s->type == HOST && !s->device ? in_host(s->host, size) : NULL;
}

static int rows(const Copy2D *c, void *stream) {
    const int status = working("cuMemcpy2DAsync_v2");
    if (status) return status;
    if (c->from.type == c->to.type) return INVALID_VALUE;
    const Work work = {side(&c->to, c->width, c->height), side(&c->from, c->width, c->height),
                       c->width, c->height, c->to.pitch, c->from.pitch, 0};
    return enqueue((uint64_t)stream, work);
}
int cuMemcpy2DAsync_v2(const Copy2D *copy, void *stream) { LOCKED(rows(copy, stream)); }

static int host_register(void *start, size_t size, unsigned flags) {
    const int status = working("cuMemHostRegister_v2");
    if (status) return status;
    if (!size || flags != PORTABLE || registered_count == 64) return INVALID_VALUE;
    char *const end = (char *)start + size;
    for (int i = 0; i < registered_count; ++i) {
        const Range *r = &registered[i];
        if ((char *)start < r->start + r->size && r->start < end) return ALREADY_REGISTERED;
    }
    registered[registered_count++] = (Range){start, size, 0};
    return SUCCESS;
}
int cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
    LOCKED(host_register(start, size, flags));
}

static int host_unregister(void *start) {
    const int status = working("cuMemHostUnregister");
    if (status) return status;
    for (int i = 0; i < registered_count; ++i) {
        if (registered[i].start != (char *)start) continue;
        const int is_mapped = !msync(start, registered[i].size, MS_ASYNC);
        registered[i] = registered[--registered_count];
        return is_mapped ? SUCCESS : INVALID_VALUE;
    }
    return NOT_REGISTERED;
}
int cuMemHostUnregister(void *start) { LOCKED(host_unregister(start)); }

/* -- for tests ---------------------------------------------------------------------------- */

uint64_t stand_in_allocate(int device, size_t size) {
    Range *const r = &allocations[allocation_count++];
    *r = (Range){calloc(1, size), size, device};
    return (uint64_t)r->start + TAG;
}

/* The engine starts a kernel that writes these bytes. */
void stand_in_write_later(uint64_t address, const void *bytes, size_t size) {
    writes[write_count] = (Write){(char *)(address - TAG), malloc(size), size};
    memcpy(writes[write_count++].bytes, bytes, size);
}

/* What an engine does in __dlpack__: the stream waits for what was started so far. */
int stand_in_wait(uint64_t handle) {
    Stream *const stream = stream_of(handle);
    if (!stream || stream->count == MANY) return INVALID_HANDLE;
    stream->work[stream->count++] = (Work){NULL, NULL, 0, 0, 0, 0, write_count};
    return SUCCESS;
}

void stand_in_finish_writes(void) { write_until(write_count); }

int stand_in_pending_count(void) {
    int count = 0;
    for (int i = 0; i < stream_count; ++i)
        for (int j = 0; j < streams[i]->count; ++j) count += streams[i]->work[j].height > 0;
    return count;
}

int stand_in_call_count(const char *name) { return functions[slot_of(strdup(name))].calls; }

void stand_in_fail(const char *name, int error, int after) {
    const int i = slot_of(strdup(name));
    functions[i].error = error;
    functions[i].fail_after = after;
}

int stand_in_registered_count(void) { return registered_count; }
int stand_in_context_depth(void) { return depth; }
unsigned stand_in_capture_mode(void) { return capture_mode; }
void stand_in_capture(int on) { capturing = on; }

/* -- DLPack, version 1 and before: what __dlpack__ returns ---------------------------------- */

typedef struct {
    void *data;
    int32_t device_type, device, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;
typedef struct Versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct Versioned *);
    uint64_t flags;
    Tensor tensor;
} Versioned;
typedef struct Managed {
    Tensor tensor;
    void *context;
    void (*deleter)(struct Managed *);
} Managed;

extern void *PyCapsule_New(void *, const char *, void (*)(void *));
extern void *PyCapsule_GetPointer(void *, const char *);
extern int PyCapsule_IsValid(void *, const char *);

static void drop_versioned(Versioned *v) { free(v->tensor.shape); free(v); --live_exports; }
static void drop_managed(Managed *m) { free(m->tensor.shape); free(m); --live_exports; }

static void drop_capsule(void *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        Managed *const m = PyCapsule_GetPointer(capsule, "dltensor");
        m->deleter(m);
    } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        Versioned *const v = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        v->deleter(v);
    }
}

/* Shape and strides (in elements) one after the other; a part of the address is byte_offset. */
void *stand_in_export(uint64_t address, int device, int ndim, const int64_t *shape_strides,
                      int code, int bits, int read_only, int versioned) {
    int64_t *const dimensions = malloc(sizeof(int64_t) * (2 * (size_t)ndim + 1));
    memcpy(dimensions, shape_strides, sizeof(int64_t) * 2 * (size_t)ndim);
    const uint64_t offset = 64;
    const Tensor tensor = {(void *)(address - offset), 2, device, ndim, (uint8_t)code,
                           (uint8_t)bits, 1, dimensions, dimensions + ndim, offset};
    ++live_exports;
    if (versioned) {
        Versioned *const v = malloc(sizeof *v);
        *v = (Versioned){1, 0, NULL, drop_versioned, read_only ? 1 : 0, tensor};
        return PyCapsule_New(v, "dltensor_versioned", drop_capsule);
    }
    Managed *const m = malloc(sizeof *m);
    *m = (Managed){tensor, NULL, drop_managed};
    return PyCapsule_New(m, "dltensor", drop_capsule);
}

int stand_in_live_export_count(void) { return live_exports; }
