/* For User-Mode Linux on CPUs whose register state has grown: built and preloaded by netem/uml.py.

   UML 6.1 saves and restores a process's registers (PTRACE_GETREGSET and SETREGSET, XSAVE format) in a buffer as large
   as AVX-512 needs. A host whose CPU has more, such as AMX, refuses to set anything but the whole, and UML dies in its
   first process. Here what it sets is filled up with zeros: the parts beyond are those that its header says are unused. */

#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char whole[1 << 16]; /* not on the stack: UML's kernel stacks are small, and it has one CPU */
static size_t whole_bytes;

static long call(long request, long pid, void *address, void *data)
{
    return syscall(SYS_ptrace, request, pid, address, data);
}

long ptrace(enum __ptrace_request request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    long pid = va_arg(arguments, pid_t);
    void *address = va_arg(arguments, void *), *data = va_arg(arguments, void *);
    va_end(arguments);

    if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
        long value, failed = call(request, pid, address, &value); /* as the C library does it */
        if (failed >= 0)
            errno = 0;
        return failed < 0 ? failed : value;
    }
    if (request != PTRACE_SETREGSET || address != (void *)NT_X86_XSTATE)
        return call(request, pid, address, data);

    struct iovec *asked = data, iov = {whole, sizeof whole};
    if (whole_bytes == 0) {
        if (call(PTRACE_GETREGSET, pid, address, &iov) < 0)
            return -1;
        whole_bytes = iov.iov_len;
        memset(whole, 0, sizeof whole);
    }
    if (asked->iov_len >= whole_bytes)
        return call(request, pid, address, data);
    memcpy(whole, asked->iov_base, asked->iov_len);
    iov.iov_len = whole_bytes;
    return call(request, pid, address, &iov);
}
