/* What has gone to other hosts: counted by the engine, and by the kernel for this process's sockets. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>

#include "python/python_glue.h"

PyObject *hvdl_py_sent_bytes(PyObject *object, PyObject *unused)
{
    hvdl_engine *engine = hvdl_py_engine((EngineObject *)object);
    (void)unused;
    PyObject *found = engine ? PyDict_New() : NULL;
    for (int rank = 0; found && rank < hvdl_engine_num_ranks(engine); rank++) {
        uint64_t bytes = hvdl_engine_sent_bytes(engine, rank);
        if (!bytes)
            continue;
        PyObject *key = PyLong_FromLong(rank);
        PyObject *value = PyLong_FromUnsignedLongLong((unsigned long long)bytes);
        if (!key || !value || PyDict_SetItem(found, key, value))
            Py_CLEAR(found);
        Py_XDECREF(key);
        Py_XDECREF(value);
    }
    return found;
}

typedef union {
    struct sockaddr any;
    struct sockaddr_in ip4;
    struct sockaddr_in6 ip6;
} address;

typedef int (*name_of)(int fd, struct sockaddr *to, socklen_t *bytes);

/* The address in words, one of IPv4 always alike. False: there is none, or it is within the host. */
static bool read_address(name_of name, int fd, char text[INET6_ADDRSTRLEN])
{
    address found;
    socklen_t bytes = sizeof found;
    if (name(fd, &found.any, &bytes))
        return false;
    struct in_addr ip4 = {0};
    const struct in6_addr *ip6 = &found.ip6.sin6_addr;
    if (found.any.sa_family == AF_INET)
        ip4 = found.ip4.sin_addr;
    else if (found.any.sa_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(ip6))
        memcpy(&ip4, ip6->s6_addr + 12, sizeof ip4);
    else if (found.any.sa_family == AF_INET6)
        return !IN6_IS_ADDR_LOOPBACK(ip6) && inet_ntop(AF_INET6, ip6, text, INET6_ADDRSTRLEN);
    else
        return false;
    bool is_loopback = ntohl(ip4.s_addr) >> 24 == 127;
    return !is_loopback && inet_ntop(AF_INET, &ip4, text, INET6_ADDRSTRLEN);
}

/* Of asm-generic, for headers older than Linux 4.12. */
#ifndef SO_COOKIE
#define SO_COOKIE 57
#endif

/* Tells the connection from any other of this host, or, with an older kernel, from those at the same time. */
static bool read_key(int fd, uint64_t *key)
{
    socklen_t bytes = sizeof *key;
    if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, key, &bytes) == 0)
        return true;
    address local, peer;
    socklen_t local_bytes = sizeof local, peer_bytes = sizeof peer;
    if (getsockname(fd, &local.any, &local_bytes) || getpeername(fd, &peer.any, &peer_bytes))
        return false;
    /* The ports lie alike in the addresses of both families. */
    *key = (uint64_t)ntohs(local.ip4.sin_port) << 16 | ntohs(peer.ip4.sin_port);
    return true;
}

/* The kernel's struct tcp_info up to what is read here, since older headers lack that part of it. */
typedef struct {
    uint8_t states[8];
    uint32_t words[24];
    uint64_t pacing_rate, max_pacing_rate, bytes_acked, bytes_received;
    uint32_t more_words[6];
    uint64_t delivery_rate, busy_us, window_full_us;
} tcp_facts;

/* Since Linux 4.10 the kernel knows for how long a connection was busy: had bytes that its peer had not
 * acknowledged. In a part of that the peer's window was full: its program did not read. Bytes get through in that
 * part, too, so both are handed out. Another thread may meanwhile close the descriptor and get its number for another
 * connection: then the key has changed. */
PyObject *hvdl_py_tcp_connection(PyObject *module, PyObject *object)
{
    int fd = (int)PyLong_AsLong(object);
    tcp_facts info = {0};
    socklen_t bytes = sizeof info;
    char local[INET6_ADDRSTRLEN], peer[INET6_ADDRSTRLEN];
    uint64_t key, key_afterwards;
    (void)module;
    if (PyErr_Occurred())
        return NULL;
    if (!read_key(fd, &key) || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) ||
        bytes < sizeof info || !info.bytes_acked || !read_address(getsockname, fd, local) ||
        !read_address(getpeername, fd, peer) || strcmp(local, peer) == 0 ||
        !read_key(fd, &key_afterwards) || key != key_afterwards)
        Py_RETURN_NONE;
    return Py_BuildValue("(ssKKdd)", local, peer, (unsigned long long)key,
                         (unsigned long long)info.bytes_acked, (double)info.busy_us / 1e6,
                         (double)info.window_full_us / 1e6);
}
