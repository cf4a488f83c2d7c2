"""The benchmark's baseline: the same rules and counts (extents, blanks) in plain Python, without leaps.

One replica, fcfs or priority queue, no retention. Equal to the recorded runs of the real scheduler in every
call record.
"""

import heapq

NS = 1_000_000_000


def to_ns(x):
    """Seconds to whole nanoseconds."""
    return round(x * NS)


class Req:
    __slots__ = (
        "cached_first",
        "comp",
        "first_sched",
        "first_tok",
        "k",
        "known",
        "max_out",
        "n_out",
        "nb",
        "ncached",
        "npre",
        "p",
        "prio",
        "prompt",
        "rel",
        "resume_hit",
        "service",
        "state",
    )

    def key(self):
        return (self.prio, self.rel, self.p, self.k)


SH = -1


class Pool:
    """counts only: extents + blanks"""

    def __init__(self, n, B, S):
        self.B, self.S = B, S
        self.nS = S // B
        self.fresh = n - 1
        self.cf = {}
        self.key = {}
        self.bb = {}
        self.tail = 0
        self.seq = 0
        self.evicted = 0
        self.held = {}  # r -> shared blocks held
        self.rs = 0  # shared resident

    @property
    def free(self):
        return range(self.fresh + sum(self.cf.values()) + sum(self.bb.values()) + self.tail)

    def sh_inuse(self):
        return max(self.held.values(), default=0)

    def lookup(self, r):
        cap = (r.known - 1) // self.B
        s = min(self.rs, self.nS, cap)
        if s < self.nS:
            return [("s", s), ("p", 0)]
        return [("s", s), ("p", min(self.cf.get(r.p, 0), cap - s))]

    def nhit(self, h):
        return h[0][1] + h[1][1]

    def idle(self, h):
        return max(0, h[0][1] - self.sh_inuse()) + h[1][1]

    def remove(self, o):
        bl = self.bb.pop(o)
        k = self.key.pop(o)
        self.cf.pop(o)
        succ = [x for x in self.key if self.key[x] > k]
        if succ:
            self.bb[min(succ, key=lambda x: self.key[x])] += bl
        else:
            self.tail += bl

    def append(self, o, n):
        self.seq += 1
        assert o not in self.cf
        self.cf[o] = n
        self.key[o] = self.seq
        self.bb[o] = self.tail
        self.tail = 0

    def take(self, n):
        k = min(n, self.fresh)
        self.fresh -= k
        n -= k
        while n > 0:
            if self.key:
                v = min(self.key, key=lambda x: self.key[x])
                k = min(n, self.bb[v])
                self.bb[v] -= k
                n -= k
                k = min(n, self.cf[v])
                self.cf[v] -= k
                n -= k
                self.evicted += k
                if v == SH:
                    self.rs -= k
                if (self.cf[v] == 0 and self.bb[v] == 0) or self.cf[v] == 0:
                    self.remove(v)
            else:
                k = min(n, self.tail)
                assert k == n
                self.tail -= k
                n -= k
        return None

    def touch(self, r, h):
        s, p = h[0][1], h[1][1]
        if p:
            assert self.cf[r.p] == p
            self.remove(r.p)
        if s > self.sh_inuse() and SH in self.cf:
            left = self.rs - s
            assert left == 0, (left,)
            self.remove(SH)
        self.held[r] = s

    def release(self, r):
        s = min(r.nb, self.nS)
        priv = r.nb - s
        cs = min(r.ncached, self.nS)
        cp = r.ncached - cs
        old = self.sh_inuse()
        del self.held[r]
        new = self.sh_inuse()
        self.tail += priv - cp
        if cp:
            self.append(r.p, cp)
        blank_s = s - cs
        if old > new or blank_s:
            # shared part [new, s) freed
            self.tail += blank_s
            nfree = cs - new
            if nfree > 0:
                if SH in self.cf:
                    n0 = self.cf[SH]
                    self.remove(SH)
                    self.append(SH, n0 + nfree)
                else:
                    self.append(SH, nfree)
        r.nb = 0
        r.ncached = 0

    def cache(self, r, n_tokens):
        r.ncached = max(r.ncached, n_tokens // self.B)
        s = min(r.ncached, self.nS)
        self.rs = max(self.rs, s)
        self.held[r] = max(self.held[r], s)


def simulate(wl):
    cfg, progs, S = wl["config"], wl["programs"], wl["system_prefix_tokens"]
    B, policy = cfg["block_size"], cfg["policy"]
    c0, c_tok, c_seq, c_kv = (to_ns(wl["cost"][k]) for k in ("c0", "c_tok", "c_seq", "c_kv"))
    pool = Pool(cfg["num_gpu_blocks"], B, S)
    P = len(progs)
    arrival = [to_ns(p["arrival_s"]) for p in progs]
    attained = [0] * P
    prompts = []
    for p in progs:
        ctx, lengths = S, []
        for new, out, _ in p["calls"]:
            ctx += new
            lengths.append(ctx)
            ctx += out
        prompts.append(lengths)
    prio_fn = {
        "plas": lambda p, k: attained[p] // 1000,
        "call_index": lambda p, k: k,
        "program_arrival": lambda p, k: arrival[p] // 1000,
        "zero": lambda p, k: 0,
        "reverse_arrival": lambda p, k: -(arrival[p] // 1000),
        None: lambda p, k: 0,
    }[cfg["priority_fn"] if policy == "priority" else None]
    releases = [(arrival[p], p, 0) for p in range(P)]
    heapq.heapify(releases)
    waiting = []  # fcfs: front at index 0; priority: kept sorted by key
    running = []
    recs, finish = {}, [None] * P
    t = dict(
        iterations=0,
        empty_schedules=0,
        preemptions=0,
        prompt_tokens=0,
        hit_tokens=0,
        prefill_tokens_computed=0,
        recompute_tokens=0,
        decode_tokens=0,
        resume_hit_tokens=0,
    )
    now = busy = 0
    min_free, max_run, max_wait = len(pool.free), 0, 0
    log, trace, plog = [], [], []

    def preempt(r):
        pool.release(r)
        r.comp, r.state = 0, "preempted"
        r.npre += 1
        waiting.insert(0, r)
        if policy == "priority":
            waiting.sort(key=Req.key)

    while True:
        if not running and not waiting:
            if not releases:
                break
            now = max(now, releases[0][0])
        added = False
        while releases and releases[0][0] <= now:
            r = Req()
            r.rel, r.p, r.k = heapq.heappop(releases)
            r.prompt = r.known = prompts[r.p][r.k]
            r.max_out = progs[r.p]["calls"][r.k][1]
            r.n_out = r.comp = r.ncached = r.npre = r.resume_hit = r.service = 0
            r.nb, r.state, r.prio = 0, "new", prio_fn(r.p, r.k)
            r.first_sched = r.first_tok = r.cached_first = None
            t["prompt_tokens"] += r.prompt
            waiting.append(r)
            added = True
        if added and policy == "priority":
            waiting.sort(key=Req.key)

        budget = cfg["max_num_batched_tokens"]
        batch, preempted = [], []  # batch: [req, n, computed before]
        i = 0
        while i < len(running) and budget > 0:
            r = running[i]
            n = min(r.known - r.comp, budget, cfg["max_model_len"] - 1 - r.comp)
            assert n > 0
            ok = True
            while True:
                need = max(0, -(-(r.comp + n) // B) - r.nb)
                if need <= len(pool.free):
                    break
                if policy == "priority":
                    j = max(range(len(running)), key=lambda x: (running[x].prio, running[x].rel, -x))
                    v = running.pop(j)
                    s = next((x for x in range(len(batch)) if batch[x][0] is v), None)
                    if s is not None:
                        budget += batch.pop(s)[1]
                        i -= 1
                else:
                    v = running.pop()
                preempt(v)
                preempted.append(v)
                if v is r:
                    ok = False
                    break
            if not ok:
                break
            pool.take(need)
            r.nb += need
            pool.cache(r, r.comp + n)
            batch.append([r, n, r.comp])
            budget -= n
            i += 1
        if not preempted:
            while waiting and budget > 0 and len(running) < cfg["max_num_seqs"]:
                r = waiting[0]
                hit = pool.lookup(r)
                nh = pool.nhit(hit)
                h = nh * B
                n = min(r.known - h, budget)
                idle_hits = pool.idle(hit)
                if -(-r.known // B) - nh + idle_hits > len(pool.free):
                    break
                pool.touch(r, hit)
                r.nb, r.ncached = nh, nh
                q = -(-(h + n) // B) - nh
                pool.take(q)
                r.nb += q
                pool.cache(r, h + n)
                waiting.pop(0)
                running.append(r)
                r.comp = h
                batch.append([r, n, h])
                budget -= n
                if r.state == "new":
                    r.first_sched, r.cached_first = now, h
                    t["hit_tokens"] += h
                else:
                    r.resume_hit += h
                    t["resume_hit_tokens"] += h
                r.state = "running"
        t["preemptions"] += len(preempted)
        pre = sorted([v.p, v.k] for v in preempted)
        if pre and len(plog) < 5000:
            plog.append([now / NS, pre])
        if not batch:
            assert preempted, "no progress"
            t["empty_schedules"] += 1
            continue
        T = sum(n for _, n, _ in batch)
        K = sum(n + c for _, n, c in batch)
        dt = c0 + c_tok * T + c_seq * len(batch) + c_kv * K
        start, now = now, now + dt
        busy += dt
        row = []
        done = []
        for r, n, c in batch:
            r.comp = c + n
            r.service += dt
            attained[r.p] += dt
            if c == r.known - 1 and r.n_out > 0:
                t["decode_tokens"] += n
            else:
                t["prefill_tokens_computed"] += n
                if r.npre:
                    t["recompute_tokens"] += n
            row.append([r.p, r.k, n, c])
            if r.comp == r.known:
                r.known += 1
                r.n_out += 1
                if r.first_tok is None:
                    r.first_tok = now
                if r.n_out == r.max_out:
                    pool.release(r)
                    done.append(r)
        for r in done:
            running.remove(r)
            recs[r.p, r.k] = [
                r.p,
                r.k,
                r.prompt,
                r.max_out,
                r.prio,
                r.rel / NS,
                r.first_sched / NS,
                r.first_tok / NS,
                now / NS,
                r.cached_first,
                r.npre,
                r.resume_hit,
                r.service / NS,
            ]
            if r.k + 1 < len(progs[r.p]["calls"]):
                heapq.heappush(releases, (now + to_ns(progs[r.p]["calls"][r.k][2]), r.p, r.k + 1))
            else:
                finish[r.p] = now
        free = len(pool.free)
        min_free, max_run, max_wait = (
            min(min_free, free),
            max(max_run, len(running)),
            max(max_wait, len(waiting)),
        )
        if t["iterations"] < wl["iter_log_max"]:
            log.append([start / NS, dt / NS, len(batch), T, free, len(running), len(waiting), len(preempted)])
        if t["iterations"] < wl["trace_max"]:
            trace.append([row, pre])
        t["iterations"] += 1
    t.update(
        makespan_s=now / NS,
        busy_s=busy / NS,
        cached_blocks_evicted=pool.evicted,
        min_free_blocks=min_free,
        max_running=max_run,
        max_waiting=max_wait,
    )
    return dict(
        totals=t,
        calls=[recs[k] for k in sorted(recs)],
        iterations=log,
        trace=trace,
        preemption_log=plog,
        programs=[
            [p, arrival[p] / NS, finish[p] / NS, (finish[p] - arrival[p]) / NS, attained[p] / NS]
            for p in range(P)
        ],
    )
