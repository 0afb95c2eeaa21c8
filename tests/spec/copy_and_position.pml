/*
 * The second hard rule of the queue protocol: a shard keeps its position in each log of the bus together with
 * the events that it copied, and a copy is accepted only from that position. So each event of the bus is copied
 * once and in order, also if calls are repeated or late, if several readers copy at the same time, and if
 * Redis loses its last writes.
 *
 * A log has the entries 1 to LENGTH. Each entry is for one shard, and has a name: a later entry with the same
 * name is a repetition, which is dropped (`bus.dedup`). A reader sends calls. A call covers a part of some
 * logs, (prev, last], and has the entries of the shard in it. A reader sends the next call before it has the
 * reply to the one before. When it waits too long for replies, it opens a new session, and the calls of the
 * old one may still arrive at any time until Redis restarts, or never.
 *
 * All shards are in one Redis. A restart closes all connections, and each shard returns to what is on its disk.
 *
 * `copied` has all entries that were ever queued in a shard. It belongs to the shard, so it rolls back with
 * a lost tail. What happens to an event after it was queued is the subject of fence_and_run.pml.
 */

#define READERS 2 /* See `readers`. */
#ifndef SHARDS
#define SHARDS 1
#endif
#ifndef LOGS
#define LOGS 2
#endif
#ifndef LENGTH
#define LENGTH 2
#endif
#define ENTRIES (LOGS * LENGTH)
#define BIT(n) (1 << (n))
/* Entries are numbered through all logs, from 0. */
#define LOG_OF(entry) ((entry) / LENGTH)
#define IS_BEHIND(entry, s) (s.at[LOG_OF(entry)] > (entry) % LENGTH)
#if SHARDS == 1
#define SHARD_OF(entry) 0
#else
#define SHARD_OF(entry) ((entry) % 2)
#endif
#define NAME_OF(entry) ((entry) == LENGTH && repetitions -> 0 : (entry))

/* Of the environment variables of the same names. */
hidden byte readers = 2;                /* READERS, 1 or 2 */
hidden byte repetitions;                /* REPETITIONS: the first entry of the second log repeats that of the first. */
hidden byte mistake;                    /* MISTAKE, see below; 0: none. */
byte timeouts = 1;                      /* TIMEOUTS: a reader opens a new session while calls are under way. */
byte tails = 1;                         /* LOST_TAILS: Redis restarts without its last writes. */

/*
 * A repetition refers to a copy that can be lost, with REPETITIONS and LOST_TAILS, and with TIMEOUTS or two readers:
 *   1. Two logs have the event. A call with the second of the two times out, or is that of another reader.
 *   2. The next session sends the first of the two, and leaves the second out as a repetition.
 *   3. The call of step 1 arrives and copies the second. So the shard answers SEEN to the first.
 *   4. Redis restarts and loses that copy.
 *   5. The reader sends the call again, without the first. The chain fits, because the position rolled back too.
 * So a call names the repetitions that were left out of it, and is refused if one of the names is not noted.
 */

/* Rules that can be left out, to show that this is found. */
#define POSITION_BEHIND_THE_COPY 1 /* The position is written by a second command, */
#define POSITION_BEFORE_THE_COPY 2 /* or the copy is. */
#define CHAIN_NOT_COMPARED 3       /* Only a part that was copied before is refused. */
#define ONE_LOG_COMPARED 4         /* Of a call of several logs, only the first log is compared. */
#define TRIM_AHEAD_OF_A_SHARD 5    /* A log is trimmed up to the position of the fastest shard. */
#define TRIM_AHEAD_OF_THE_DISK 6   /* A log is trimmed up to positions that can still be lost. */
#define NAMES_BEFORE_THE_CHAIN 7   /* Names are noted before the chain is compared. */
#define POSITION_WITHOUT_THE_REST 8 /* The position moves although the call has repetitions. */
#define LEFT_OUT_NOT_COMPARED 9    /* A call is accepted although the copy of a repetition is lost. */
#define IN_TWO_STEPS (mistake == POSITION_BEHIND_THE_COPY || mistake == POSITION_BEFORE_THE_COPY)

typedef Shard {
  byte at[LOGS];     /* The position: the last offset that was copied. */
  byte copied;       /* Entries, a bit each. */
  byte names         /* Names of copied entries, a bit each. */
}

typedef Call {
  byte shard;
  byte prev[LOGS];
  byte last[LOGS];   /* As `prev`: the call covers nothing of the log. */
  byte entries;
  byte left_out;     /* Repetitions that were left out, by their entries. */
  bool is_half_done  /* See IN_TWO_STEPS. */
}

typedef Calls {
  byte count;
  Call call[2]
}

typedef Standing { byte at[LOGS] }

typedef Reader {
  bool open;
  Standing knows[SHARDS] /* What it believes of each shard, including the calls that it sent. */
}

Shard shard[SHARDS], disk[SHARDS];
Reader reader[READERS];
/* Calls without a reply, calls that must be sent again, and late calls of an older session. */
Calls sent[READERS], again[READERS], late[READERS];
byte trimmed[LOGS];  /* The last offset that is gone. */

hidden byte i, j, k, s, names, seen, reply, fits, behind, covered, low, entries;
hidden byte ok;
#define DONE 0
#define DUP 1
#define GAP 2
#define SEEN 3
#define C calls.call[0]

inline copy_call(to, from) {
  to.shard = from.shard; to.entries = from.entries; to.left_out = from.left_out; to.is_half_done = from.is_half_done;
  for (j : 0 .. LOGS - 1) { to.prev[j] = from.prev[j]; to.last[j] = from.last[j] }
}

inline clear_call(of_call) {
  of_call.shard = 0; of_call.entries = 0; of_call.left_out = 0; of_call.is_half_done = false;
  for (j : 0 .. LOGS - 1) { of_call.prev[j] = 0; of_call.last[j] = 0 }
}

inline clear(calls) { clear_call(calls.call[0]); clear_call(calls.call[1]); calls.count = 0 }

inline copy_calls(to, from) {
  copy_call(to.call[0], from.call[0]); copy_call(to.call[1], from.call[1]); to.count = from.count
}

inline remove_first(calls) {
  copy_call(calls.call[0], calls.call[1]); clear_call(calls.call[1]); calls.count--
}

inline copy_shard(to, from) {
  to.copied = from.copied; to.names = from.names;
  for (j : 0 .. LOGS - 1) { to.at[j] = from.at[j] }
}

inline names_of(mask) {
  names = 0;
  for (j : 0 .. ENTRIES - 1) {
    if
    :: (mask & BIT(j)) != 0 -> names = names | BIT(NAME_OF(j))
    :: else
    fi
  }
}

inline store(calls) {
  for (j : 0 .. ENTRIES - 1) {
    if
    :: (C.entries & BIT(j)) != 0 ->
      /* The promises: no entry twice, none after a later one of its log. */
      assert((shard[s].copied & BIT(j)) == 0);
      assert((shard[s].copied & ~(BIT(j + 1) - 1) & (BIT((LOG_OF(j) + 1) * LENGTH) - 1)) == 0);
      shard[s].copied = shard[s].copied | BIT(j)
    :: else
    fi
  }
  names_of(C.entries);
  shard[s].names = shard[s].names | names
}

inline move(calls) {
  for (j : 0 .. LOGS - 1) {
    shard[s].at[j] = (C.prev[j] != C.last[j] -> C.last[j] : shard[s].at[j])
  }
}

/* lua/enqueue.lua for the first of these calls. Sets `reply`, and the entries that are repetitions. */
inline enqueue(calls) {
  s = C.shard; fits = 0; behind = 0; covered = 0; seen = 0;
  for (j : 0 .. LOGS - 1) {
    if
    :: C.prev[j] != C.last[j] && (mistake != ONE_LOG_COMPARED || covered == 0) ->
      covered++;
      if
      :: shard[s].at[j] >= C.last[j] -> behind++
      :: else ->
        if
        :: shard[s].at[j] == C.prev[j] || mistake == CHAIN_NOT_COMPARED -> fits++
        :: else
        fi
      fi
    :: else
    fi
  }
  for (j : 0 .. ENTRIES - 1) {
    if
    :: repetitions && (C.entries & BIT(j)) != 0 && (shard[s].names & BIT(NAME_OF(j))) != 0 -> seen = seen | BIT(j)
    :: else
    fi
  }
  ok = true;
  for (j : 0 .. ENTRIES - 1) {
    if
    :: (C.left_out & BIT(j)) != 0 && mistake != LEFT_OUT_NOT_COMPARED ->
      ok = ok && (shard[s].names & BIT(NAME_OF(j))) != 0
    :: else
    fi
  }
  if
  :: C.is_half_done ->
    reply = DONE; C.is_half_done = false;
    if
    :: mistake == POSITION_BEHIND_THE_COPY -> move(calls)
    :: else -> store(calls)
    fi
  :: else ->
    reply = (behind == covered -> DUP : (fits < covered || !ok -> GAP : (seen != 0 -> SEEN : DONE)));
    if
    :: reply == DONE && IN_TWO_STEPS ->
      C.is_half_done = true;
      if
      :: mistake == POSITION_BEHIND_THE_COPY -> store(calls)
      :: else -> move(calls)
      fi
    :: reply == DONE && !IN_TWO_STEPS -> store(calls); move(calls)
    :: reply == SEEN && mistake == POSITION_WITHOUT_THE_REST -> move(calls)
    :: reply != DONE && mistake == NAMES_BEFORE_THE_CHAIN ->
      names_of(C.entries); shard[s].names = shard[s].names | names
    :: else
    fi
  fi
}

/* The promises: what a position has passed was copied, or it repeats an entry that was copied or will be.
 * What it has not passed is not trimmed. */
inline check() {
  for (i : 0 .. SHARDS - 1) {
    for (j : 0 .. ENTRIES - 1) {
      if
      :: SHARD_OF(j) == i && IS_BEHIND(j, shard[i]) ->
        ok = (shard[i].copied & BIT(j)) != 0 || mistake == POSITION_BEFORE_THE_COPY;
        for (k : 0 .. ENTRIES - 1) {
          ok = ok || (k != j && NAME_OF(k) == NAME_OF(j) &&
                      ((shard[i].copied & BIT(k)) != 0 || !IS_BEHIND(k, shard[i])))
        }
        assert(ok)
      :: SHARD_OF(j) == i && !IS_BEHIND(j, shard[i]) -> assert(trimmed[LOG_OF(j)] <= j % LENGTH)
      :: else
      fi
    }
  }
}

inline lose_session(r) {
  reader[r].open = false;
  clear(again[r]);
  for (i : 0 .. SHARDS - 1) { for (j : 0 .. LOGS - 1) { reader[r].knows[i].at[j] = 0 } }
}

/* A session starts at the positions of the shards, so it reads from that of the lowest. */
inline start_session(r) {
  reader[r].open = true;
  for (i : 0 .. SHARDS - 1) { for (j : 0 .. LOGS - 1) { reader[r].knows[i].at[j] = shard[i].at[j] } }
}

/* Sends the call for `of_shard` with so many further offsets of the logs. An entry with the name of another one
 * of the same batch is left out. */
inline send(r) {
  names = 0; entries = 0; k = sent[r].count;
  if
  :: k == 1 && sent[r].call[0].shard == of_shard -> names_of(sent[r].call[0].entries)
  :: else
  fi;
  sent[r].call[k].shard = of_shard;
  for (i : 0 .. LOGS - 1) {
    low = reader[r].knows[of_shard].at[i];
    covered = low + (i == 0 -> first : second);
    sent[r].call[k].prev[i] = low; sent[r].call[k].last[i] = covered;
    reader[r].knows[of_shard].at[i] = covered;
    for (j : i * LENGTH + low .. i * LENGTH + covered - 1) {
      if
      :: SHARD_OF(j) == of_shard && (names & BIT(NAME_OF(j))) == 0 ->
        entries = entries | BIT(j); names = names | BIT(NAME_OF(j))
      :: else
      fi
    }
  }
  sent[r].call[k].entries = entries;
  sent[r].count++
}

/* A shard runs a call, and the reader gets the reply. */
inline run_call(r) {
  enqueue(sent[r]);
  if
  :: reply == GAP && (again[r].count == 0 || again[r].call[0].shard != s) ->
    remove_first(sent[r]); lose_session(r)
  :: reply == SEEN || (reply == GAP && again[r].count > 0 && again[r].call[0].shard == s) ->
    if
    :: reader[r].open ->
      k = again[r].count;
      copy_call(again[r].call[k], sent[r].call[0]);
      again[r].call[k].entries = again[r].call[k].entries & ~(reply == SEEN -> seen : 0);
      again[r].call[k].left_out = again[r].call[k].left_out | (reply == SEEN -> seen : 0);
      again[r].count++
    :: else
    fi;
    remove_first(sent[r])
  :: else ->
    if
    :: sent[r].call[0].is_half_done
    :: else -> remove_first(sent[r])
    fi
  fi;
  check();
  i = 0
}

inline run_late_call(r) {
  enqueue(late[r]);
  if
  :: late[r].call[0].is_half_done
  :: else -> remove_first(late[r])
  fi;
  check();
  i = 0
}

#define MAY_SEND(r) (reader[r].open && sent[r].count < 2 && again[r].count == 0)
#define ROOM(r, of_shard, log, more) (reader[r].knows[of_shard].at[log] + more <= LENGTH)
#define RESTS(r) (sent[r].count == 0 && again[r].count == 0)
#define DIFFERS(r, i, j) (reader[r].knows[i].at[j] != shard[i].at[j])
#if LOGS == 1 && SHARDS == 2
#define IS_ELSEWHERE(r) (DIFFERS(r, 0, 0) || DIFFERS(r, 1, 0))
#elif SHARDS == 1 && LOGS == 2
#define IS_ELSEWHERE(r) (DIFFERS(r, 0, 0) || DIFFERS(r, 0, 1))
#elif SHARDS == 1
#define IS_ELSEWHERE(r) DIFFERS(r, 0, 0)
#else
#define IS_ELSEWHERE(r) \
  (DIFFERS(r, 0, 0) || DIFFERS(r, 0, 1) || DIFFERS(r, 1, 0) || DIFFERS(r, 1, 1))
#endif

#if LOGS == 1
#define HAS_MORE(r, n) ROOM(r, n, 0, 1)
#else
#define HAS_MORE(r, n) (ROOM(r, n, 0, 1) || ROOM(r, n, 1, 1))
#endif

/* Any number of further offsets of each log, not none of all. */
inline send_some(r) {
  if
  :: ROOM(r, of_shard, 0, 1) -> second = 0
#if LOGS > 1
  :: ROOM(r, of_shard, 1, 1) -> second = 1
  :: ROOM(r, of_shard, 1, 2) -> second = 2
#endif
  fi;
  if
  :: second > 0 -> first = 0
  :: ROOM(r, of_shard, 0, 1) -> first = 1
  :: ROOM(r, of_shard, 0, 2) -> first = 2
#if LENGTH > 2
  :: ROOM(r, of_shard, 0, 3) -> first = 3
#endif
  fi;
  d_step { send(r); of_shard = 0; first = 0; second = 0; i = 0 }
}

proctype Reader_of_the_bus(byte r) {
  byte of_shard, first, second;
end:
  do
  :: d_step { RESTS(r) && (!reader[r].open || IS_ELSEWHERE(r)) -> start_session(r); i = 0 }
  :: atomic { MAY_SEND(r) && HAS_MORE(r, 0) -> of_shard = 0; send_some(r) }
#if SHARDS > 1
  :: atomic { MAY_SEND(r) && HAS_MORE(r, 1) -> of_shard = 1; send_some(r) }
#endif
  :: d_step { sent[r].count > 0 -> run_call(r) }
  :: d_step { sent[r].count == 0 && again[r].count > 0 ->
      copy_calls(sent[r], again[r]); clear(again[r]); i = 0 }
  :: d_step { sent[r].count > 0 && late[r].count == 0 && timeouts > 0 ->
      timeouts--; copy_calls(late[r], sent[r]); clear(sent[r]); lose_session(r); i = 0 }
  :: d_step { late[r].count > 0 -> run_late_call(r) }
  :: d_step { late[r].count > 0 -> clear(late[r]); i = 0 }
  od
}

#ifdef TRIM
#define MUST_SAVE true
#else
#define MUST_SAVE (tails > 0)
#endif
#define IS_SAVED(n) \
  (disk[n].copied == shard[n].copied && disk[n].names == shard[n].names && \
   disk[n].at[0] == shard[n].at[0] && disk[n].at[LOGS - 1] == shard[n].at[LOGS - 1])
#define SAVE(n) \
  :: d_step { MUST_SAVE && !IS_SAVED(n) -> copy_shard(disk[n], shard[n]); i = 0 }
#if SHARDS == 1
#define ALL_IS_SAVED IS_SAVED(0)
#else
#define ALL_IS_SAVED (IS_SAVED(0) && IS_SAVED(1))
#endif

/* The calls that were under way never arrive. */
inline hang_up() {
  for (k : 0 .. READERS - 1) {
    clear(late[k]);
    if
    :: sent[k].count > 0 ->
      clear(sent[k]); lose_session(k)
    :: else
    fi
  }
}

proctype Disk() {
end:
  do
  SAVE(0)
#if SHARDS > 1
  SAVE(1)
#endif
  :: d_step { tails > 0 && !ALL_IS_SAVED ->
      tails--;
      for (s : 0 .. SHARDS - 1) { copy_shard(shard[s], disk[s]) };
      hang_up(); check(); i = 0 }
  od
}

#ifdef TRIM
/* An entry is deleted when all shards have it on their disks. */
#define OF(n, log) (mistake == TRIM_AHEAD_OF_THE_DISK -> shard[n].at[log] : disk[n].at[log])
#if SHARDS == 1
#define END(log) OF(0, log)
#else
#define LESS(log) (OF(0, log) < OF(1, log))
#define END(log) (LESS(log) != (mistake == TRIM_AHEAD_OF_A_SHARD) -> OF(0, log) : OF(1, log))
#endif

proctype Trimmer() {
end:
  do
  :: d_step { trimmed[0] < END(0) -> trimmed[0] = END(0); check(); i = 0 }
#if LOGS > 1
  :: d_step { trimmed[1] < END(1) -> trimmed[1] = END(1); check(); i = 0 }
#endif
  od
}
#endif

/* Whenever nothing more can happen, all is copied. */
proctype Judge() {
end:
  timeout;
  d_step {
    for (i : 0 .. SHARDS - 1) {
      for (j : 0 .. LOGS - 1) { assert(shard[i].at[j] == LENGTH) }
      for (j : 0 .. ENTRIES - 1) {
        ok = SHARD_OF(j) != i;
        for (k : 0 .. ENTRIES - 1) {
          ok = ok || (NAME_OF(k) == NAME_OF(j) && (shard[i].copied & BIT(k)) != 0)
        }
        assert(ok)
      }
    }
    i = 0
  }
}

c_decl {
  static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
  }
};

init {
  atomic {
    c_code {
      readers = number("READERS", readers);
      repetitions = number("REPETITIONS", 0);
      mistake = number("MISTAKE", 0);
      now.timeouts = number("TIMEOUTS", now.timeouts);
      now.tails = number("LOST_TAILS", now.tails);
    };
    run Disk(); run Judge();
#ifdef TRIM
    run Trimmer();
#endif
    for (i : 0 .. readers - 1) { run Reader_of_the_bus(i) }
  }
}
