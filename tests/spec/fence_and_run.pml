/*
 * The first hard rule of the queue protocol: a completion is accepted only from the holder of the newest
 * lease of a bot, in the present run of Redis.
 *
 * A lease is named by a fence and by the run of Redis that granted it. `redis` is what the scripts store: a
 * restart may lose its last writes. `server_run` is the run id of the server itself: each restart has another one.
 * The first command of a connection is lua/recover.lua. It compares the two, and revokes all leases if they
 * differ.
 *
 * The queue of a bot has the events 1, 2, 3 and so on. Events leave it only at its head, so two numbers
 * describe it: the last event that left, and the last that was copied into it. copy_and_position.pml shows
 * why each event is copied once.
 *
 * The clock stands still, so a restart that loses the last fence grants it again. That is the worst case.
 */

#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef BOTS
#define BOTS 1
#endif
#ifndef EVENTS
#define EVENTS 2
#endif
#define SLICE 2      /* Maximum number of events that a holder takes. */

/* Rules that can be left out, to show that this is found. */
#define FENCE_NOT_COMPARED 1
#define RUN_NOT_COMPARED 2
#define NO_RECOVERY 3
#define COUNT_NOT_COMPARED 4
#define COMMIT_BEFORE_THE_EFFECT 5
#define REMOVAL_BEFORE_THE_COMPARISON 6 /* Events leave the queue before the fence is compared. */
#define FENCE_NOT_RAISED 7              /* A new lease has the fence of the one before. */
#define LEASES_DO_NOT_END 8             /* No lease ends by its deadline. */

/* Of the environment variables of the same names. */
hidden byte mistake;  /* MISTAKE; 0: none. */
byte crashes = 1;     /* CRASHES: a consumer forgets everything. */
byte freezes = 1;     /* FREEZES: a lease ends while its holder believes in it. */
byte replies = 1;     /* LOST_REPLIES: a script runs, and its caller does not learn it. */
byte tails = 1;       /* LOST_TAILS: Redis restarts without its last writes. */

typedef Shard {
  byte run_id;
  byte fence;        /* The last one that was granted. */
  byte own[BOTS];    /* The fence of the current lease; 0: none. */
  byte acked[BOTS];  /* Events that left under this lease. */
  byte left[BOTS];
  byte copied[BOTS]
}

typedef Held {
  bool on;
  byte bot;
  byte fence;
  byte run_id;
  byte acked;
  byte first;        /* The first event of the slice, */
  byte size;         /* the number of its events, */
  byte done;         /* and how many of them were handled. */
  bool sent;         /* A completion without a reply. It is repeated unchanged. */
  bool releases;
  bool is_newest     /* Hidden from the holder: no later lease of the bot, and no other run. */
}

Shard redis, saved;
byte server_run;
Held held[CONSUMERS];
byte handled[BOTS];  /* The last event whose effect happened. */

hidden byte i, j, n, fence_was, left_was;

#define H held[c]
#define MUST_RECOVER (redis.run_id != server_run && mistake != NO_RECOVERY)
#define CLAIMABLE(b) \
  (redis.left[b] < redis.copied[b] && (redis.own[b] == 0 || MUST_RECOVER))

inline copy_shard(to, from) {
  to.run_id = from.run_id; to.fence = from.fence;
  for (j : 0 .. BOTS - 1) {
    to.own[j] = from.own[j]; to.acked[j] = from.acked[j];
    to.left[j] = from.left[j]; to.copied[j] = from.copied[j]
  }
}

inline clear(c) {
  H.on = false; H.bot = 0; H.fence = 0; H.run_id = 0; H.acked = 0; H.first = 0; H.size = 0;
  H.done = 0; H.sent = false; H.releases = false; H.is_newest = false
}

/* lua/recover.lua */
inline recover() {
  if
  :: MUST_RECOVER ->
    redis.run_id = server_run;
    for (j : 0 .. BOTS - 1) { redis.own[j] = 0; redis.acked[j] = 0 }
  :: else
  fi
}

/* lua/claim.lua */
inline claim(c, b, is_lost) {
  recover();
  redis.fence = (mistake == FENCE_NOT_RAISED -> 1 : redis.fence + 1);
  redis.own[b] = redis.fence; redis.acked[b] = 0;
  for (j : 0 .. CONSUMERS - 1) {
    if
    :: held[j].on && held[j].bot == b -> held[j].is_newest = false
    :: else
    fi
  }
  if
  :: is_lost -> replies--
  :: else ->
    H.on = true; H.bot = b; H.fence = redis.fence; H.run_id = redis.run_id; H.is_newest = true
  fi
}

/* lua/complete.lua. Sets n: events that left. */
inline complete(c) {
  recover();
  fence_was = redis.own[H.bot]; left_was = redis.left[H.bot]; n = 0;
  if
  :: fence_was != 0 &&
     (H.fence == fence_was || mistake == FENCE_NOT_COMPARED) &&
     (H.run_id == redis.run_id || mistake == RUN_NOT_COMPARED) &&
     (redis.acked[H.bot] == H.acked || redis.acked[H.bot] == H.acked + H.done ||
      mistake == COUNT_NOT_COMPARED) ->
    if
    :: redis.acked[H.bot] == H.acked || mistake == COUNT_NOT_COMPARED ->
      n = (H.done < redis.copied[H.bot] - left_was -> H.done : redis.copied[H.bot] - left_was)
    :: else /* The same call came before. */
    fi;
    redis.left[H.bot] = left_was + n;
    redis.acked[H.bot] = redis.acked[H.bot] + n;
    if
    :: H.releases -> redis.own[H.bot] = 0; redis.acked[H.bot] = 0
    :: else
    fi
  :: else ->
    fence_was = 0; /* Stale. */
    n = (mistake == REMOVAL_BEFORE_THE_COMPARISON && left_was < redis.copied[H.bot] -> 1 : 0);
    redis.left[H.bot] = left_was + n
  fi;
  /* The promises. */
  assert(fence_was == 0 || H.is_newest);               /* The holder of the newest lease of this run. */
  assert(n == 0 || (H.is_newest && left_was + 1 == H.first)); /* It counted from this head. */
  assert(redis.left[H.bot] <= handled[H.bot])          /* Each event left after its effect. */
}

inline answered(c) {
  if
  :: H.releases || fence_was == 0 -> clear(c)
  :: else ->
    H.acked = H.acked + H.done; H.first = 0; H.size = 0; H.done = 0; H.sent = false
  fi
}

proctype Consumer(byte c) {
end:
  do
  :: d_step { !H.on && CLAIMABLE(0) -> claim(c, 0, false); i = 0 }
  :: d_step { !H.on && CLAIMABLE(0) && replies > 0 -> claim(c, 0, true); i = 0 }
#if BOTS > 1
  :: d_step { !H.on && CLAIMABLE(1) -> claim(c, 1, false); i = 0 }
  :: d_step { !H.on && CLAIMABLE(1) && replies > 0 -> claim(c, 1, true); i = 0 }
#endif
  /* lua/peek.lua: reading needs no fence. */
  :: d_step { H.on && H.size == 0 ->
      n = redis.copied[H.bot] - redis.left[H.bot];
      if
      :: n == 0 -> clear(c)
      :: else ->
        H.first = redis.left[H.bot] + 1; H.size = (n < SLICE -> n : SLICE)
      fi;
      i = 0
    }
  /* The effect of the next event of the slice. */
  :: d_step { H.on && !H.sent && H.done < H.size ->
      n = H.first + H.done;
      H.done++;
      assert(n <= handled[H.bot] + 1); /* First handlings are in order. */
      handled[H.bot] = (n > handled[H.bot] -> n : handled[H.bot])
    }
  :: d_step { H.on && !H.sent && H.done > 0 -> H.releases = true; complete(c); answered(c); i = 0 }
  :: d_step { H.on && !H.sent && H.done > 0 -> complete(c); answered(c); i = 0 }
  :: d_step { H.on && !H.sent && H.done > 0 && replies > 0 ->
      replies--; H.releases = true; H.sent = true; complete(c); i = 0 }
  :: d_step { H.on && !H.sent && H.done > 0 && replies > 0 ->
      replies--; H.sent = true; complete(c); i = 0 }
  :: d_step { H.on && H.sent -> complete(c); answered(c); i = 0 }
  :: d_step { mistake == COMMIT_BEFORE_THE_EFFECT && H.on && !H.sent && H.done < H.size ->
      H.done++; H.releases = true; complete(c); answered(c); i = 0 }
  :: d_step { H.on && crashes > 0 -> crashes--; clear(c) }
  od
}

/* lua/enqueue.lua */
proctype Copier() {
end:
  do
  :: d_step { redis.copied[0] < EVENTS -> recover(); redis.copied[0] = redis.copied[0] + 1 }
#if BOTS > 1
  :: d_step { redis.copied[1] < EVENTS -> recover(); redis.copied[1] = redis.copied[1] + 1 }
#endif
  od
}

/* The deadline of a lease passes. If its holder still believes in it, the holder was frozen. */
inline expire(b) {
  i = 0;
  for (j : 0 .. CONSUMERS - 1) {
    if
    :: held[j].on && held[j].bot == b && held[j].is_newest -> i = 1
    :: else
    fi
  }
  if
  :: i == 1 && freezes > 0 -> freezes--; redis.own[b] = 0; redis.acked[b] = 0
  :: i == 0 -> redis.own[b] = 0; redis.acked[b] = 0
  :: else
  fi
}

#define IS_HELD(b, c) (held[c].on && held[c].bot == b && held[c].is_newest)
#if CONSUMERS > 2
#define SOMEBODY_HOLDS(b) (IS_HELD(b, 0) || IS_HELD(b, 1) || IS_HELD(b, 2))
#else
#define SOMEBODY_HOLDS(b) (IS_HELD(b, 0) || IS_HELD(b, 1))
#endif
#define EXPIRES(b) \
  (mistake != LEASES_DO_NOT_END && redis.own[b] != 0 && (freezes > 0 || !SOMEBODY_HOLDS(b)))

proctype Time() {
end:
  do
  :: d_step { EXPIRES(0) -> expire(0); i = 0 }
#if BOTS > 1
  :: d_step { EXPIRES(1) -> expire(1); i = 0 }
#endif
  od
}

proctype Disk() {
end:
  do
  :: d_step { tails > 0 -> copy_shard(saved, redis); i = 0 }
  :: d_step { tails > 0 ->
      tails--; copy_shard(redis, saved); server_run++;
      for (j : 0 .. CONSUMERS - 1) { held[j].is_newest = false };
      if
      :: tails == 0 -> saved.run_id = 0; saved.fence = 0;
        for (j : 0 .. BOTS - 1) {
          saved.own[j] = 0; saved.acked[j] = 0; saved.left[j] = 0; saved.copied[j] = 0
        }
      :: else
      fi;
      i = 0
    }
  :: tails > 0 -> tails = 0 /* Nothing more is lost. */
  od
}

/* Whenever nothing more can happen, all is done: no event is lost, no bot is forgotten. */
proctype Judge() {
end:
  timeout;
  d_step {
    for (i : 0 .. BOTS - 1) {
      assert(redis.left[i] == EVENTS && redis.own[i] == 0 && handled[i] == EVENTS)
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
      mistake = number("MISTAKE", 0);
      now.crashes = number("CRASHES", now.crashes);
      now.freezes = number("FREEZES", now.freezes);
      now.replies = number("LOST_REPLIES", now.replies);
      now.tails = number("LOST_TAILS", now.tails);
    };
    run Copier(); run Time(); run Disk(); run Judge();
    for (i : 0 .. CONSUMERS - 1) { run Consumer(i) }
  }
}
