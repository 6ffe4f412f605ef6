/* Ranks and hosts that should speak about a late operation and do not: how long they are waited for, and who
 * speaks instead. The driver. */
#ifndef HVDL_SILENCE_H
#define HVDL_SILENCE_H

#include "matching/messages.h"

/* Whoever owes an answer and gives no sign of life for so long is taken for stopped. Longer than a leader
 * that does nothing sleeps. */
#define HVDL_PATIENCE_NS 1500000000ull

hvdl_err hvdl_silence_make(hvdl_engine *engine);
void hvdl_silence_free(hvdl_engine *engine);
/* Everything fails. */
void hvdl_silence_end(hvdl_engine *engine);

/* ---- ranks of this host ---- */

void hvdl_heard_rank(hvdl_engine *engine, int local);
/* Must another rank speak instead? */
bool hvdl_speaker_is_silent(const hvdl_engine *engine, const hvdl_reporting *reporting,
                            uint64_t now);

/* ---- hosts ---- */

void hvdl_heard_host(hvdl_engine *engine, int host);
/* It was asked at `since_ns`, and has not answered. */
bool hvdl_host_is_silent(const hvdl_engine *engine, int host, uint64_t since_ns, uint64_t now);
/* It did not answer: it is not waited for again before it says something. */
void hvdl_found_silent(hvdl_engine *engine, int host);
/* The leader: the host's leader must speak about it. If it is silent, this host does. */
void hvdl_ask_to_speak(hvdl_engine *engine, int host, const hvdl_late *what, uint64_t id);
/* The leader, which was stopped: another rank of this host has spoken instead. */
void hvdl_take_back_question(hvdl_engine *engine, const hvdl_late *what);

/* ---- how a rank speaks: stall.c ---- */

/* It describes its host and says that, as a host that should have spoken is silent, or a rank (-1). */
void hvdl_speak_here(hvdl_engine *engine, const hvdl_late *what, uint64_t id, int silent_host);
/* To the ranks of this host: this one has spoken, or asked another host. */
void hvdl_announce_taken(hvdl_engine *engine, const hvdl_late *what, uint64_t id);
/* Where the journal stands still. */
void hvdl_say_standstill(hvdl_engine *engine, hvdl_operation *operation, const char *text,
                         bool gives_up);

/* Finds who is silent, and has this rank speak where it must. */
void hvdl_silence_look(hvdl_engine *engine, uint64_t now);

/* ---- messages ---- */

void hvdl_on_heard(hvdl_engine *engine, const hvdl_message *message);

#endif
