"""Cache policies in plain Python, on sets of ids: what each compiled step must answer."""

import math

import numpy as np

from dinfer import bits
from dinfer.policies import words
from dinfer.policies.protocol import FREE, Decision

MASK = 2**64 - 1
NEVER = 10**6


def exchange(resident: np.ndarray, moved: Decision) -> None:
    """Make the decision ``moved`` come true in the set ``resident`` [words]."""
    neurons = 64 * len(resident)
    words.swap(resident, *(bits.from_ids(moved_ids, neurons) for moved_ids in moved))


def best(pool: set[int], k: int, value) -> list[int]:
    """The ``k`` of ``pool`` with the largest value, the lowest ids among equals, in order."""
    return sorted(sorted(pool, key=lambda i: (-value(i), i))[: max(k, 0)])


def gainful(outside: list[int], inside: list[int]) -> int:
    """How many swaps gain when the most valued outside meet the least valued inside."""
    pairs = zip(sorted(outside, reverse=True), sorted(inside), strict=False)
    return sum(enters > leaves for enters, leaves in pairs)


class NaiveLfu:
    """Counters that are halved every 32 tokens."""

    def __init__(self, case, cache) -> None:
        self.count = {i: int(np.rint(f * 32)) for i, f in enumerate(case.frequency[0])}
        self.clock = 0

    def step(self, resident, active, window, future):
        missing, spare = active - resident, resident - active
        n = min(window, len(missing), len(spare))
        moves = best(missing, n, self.count.get), best(spare, n, lambda i: -self.count[i])
        self.count = {i: min(f + (i in active), 63) for i, f in self.count.items()}
        self.clock += 1
        if self.clock % 32 == 0:
            self.count = {i: f // 2 for i, f in self.count.items()}
        return moves


def mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class NaiveRandom:
    """Bit b of neuron i's lot is bit i % 64 of a hash of seed, layer, token, i // 64 and b."""

    def __init__(self, case, cache) -> None:
        self.seed, self.token, self.neurons = cache.seed, 0, case.neurons

    def lots(self) -> dict[int, int]:
        golden = 0x9E3779B97F4A7C15
        key = mix(((1 << 32) + self.token * golden + self.seed) & MASK)
        words = -(-self.neurons // 64)
        planes = [[mix((key + (w * 12 + b) * golden) & MASK) for w in range(words)] for b in range(12)]
        bit = [[planes[b][i // 64] >> i % 64 & 1 for b in range(12)] for i in range(self.neurons)]
        return {i: sum(bit[i][b] << b for b in range(12)) for i in range(self.neurons)}

    def step(self, resident, active, window, future):
        missing, spare = active - resident, resident - active
        n = min(window, len(missing), len(spare))
        lots = self.lots()
        self.token += 1
        return best(missing, n, lots.get), best(spare, n, lots.get)


class NaiveS3Fifo:
    """Queues as sets; ``youth`` is what is left of 63 tokens."""

    def __init__(self, case, cache) -> None:
        self.youth = {i: int(np.rint(f * 63)) for i, f in enumerate(case.frequency[0])}
        self.uses = dict.fromkeys(self.youth, 0)
        self.small, self.ghosts, self.share = set(), set(), cache.share

    def enter(self, members):
        for i in members:
            self.youth[i], self.uses[i] = 63, 0

    def step(self, resident, active, window, future):
        for i in resident & active:
            self.uses[i] = min(self.uses[i] + 1, 3)
        room = int(self.share * len(resident))
        if len(self.small) > room:
            used = {i for i in self.small if self.uses[i]}
            self.small -= used
            self.enter(used)
        missing, spare = active - resident, resident - active
        n = min(window, len(missing), len(spare))
        evict = set(self.leaving(spare, n, len(self.small) - room))
        self.ghosts |= evict & self.small
        self.small -= evict
        self.enter(evict)
        known = best(missing & self.ghosts, n, lambda i: 0)
        fetch = {*known, *best(missing - self.ghosts, n - len(known), lambda i: 0)}
        self.small |= fetch - self.ghosts
        self.ghosts -= fetch
        self.enter(fetch)
        self.ghosts -= {i for i in self.ghosts if self.youth[i] == 0}
        self.youth = {i: max(youth - 1, 0) for i, youth in self.youth.items()}
        return sorted(fetch), sorted(evict)

    def leaving(self, spare, n, excess) -> list[int]:
        def worst(i):
            return -(64 * self.uses[i] + self.youth[i])

        first = best(spare & self.small, min(n, max(excess, 0)), worst)
        second = best(spare - self.small, n - len(first), worst)
        rest = spare & self.small - set(first)
        return [*first, *second, *best(rest, n - len(first) - len(second), worst)]


class NaiveTimeSaved:
    """``layer`` 0 hides no copies, a lookahead of 0 hides them behind the layer itself; ``beliefs`` as the step's."""

    def __init__(self, case, cache, beliefs=FREE, layer=0) -> None:
        self.count = {i: int(np.rint(f * 8)) for i, f in enumerate(case.frequency[0])}
        self.horizon = cache.trailing if beliefs.lag else cache.horizon
        self.parameters, self.beliefs = cache.parameters(beliefs), beliefs
        self.hidden = beliefs.lookahead > 0 and layer > 0
        self.clock, self.swaps, self.uses = 8, 64 * 1024, int(64 * 0.3 * 1024)
        self.fetched, self.evicted = set(), set()

    def judge(self, active) -> float:
        more = len(self.fetched & active) - len(self.evicted & active)
        self.swaps = int(self.swaps * 0.97 + len(self.fetched) * 1024.0)
        self.uses = int(self.uses * 0.97 + more * 1024.0)
        return self.uses / max(self.swaps, 1.0) - 1.0 / math.sqrt(max(self.swaps / 1024.0, 1.0))

    def room(self, slots, hits, misses, window):
        """Copies that stay hidden, seconds that each costs, and seconds that all that is missing saves beyond them."""
        costs, lag = self.beliefs.costs, self.beliefs.lag
        idle, beside, merge, slowed = self.parameters[[9, 10, 11, 14]]
        link, fixed = costs.link_neuron_seconds, costs.prefetch_fixed_seconds
        saved = max(costs.cpu_neuron_seconds, 1e-15)
        cpu = costs.cpu_seconds(self.beliefs.neurons, 0) - slots * costs.cpu_gate_seconds + misses * saved
        gpu = costs.gpu_fixed_seconds + slots * costs.gpu_gate_seconds + hits * costs.gpu_neuron_seconds
        if self.beliefs.lookahead and not self.hidden:
            return 0, link, 0.0
        if self.hidden:
            behind = idle + max(cpu, gpu)
            slowed = link * slowed * min(1.0, cpu / max(behind, 1e-15))
            each = link - slowed + (0.0 if lag else saved)
        else:
            behind, slowed = cpu - gpu, link * slowed
            each = link + (0.0 if lag else saved) + costs.gpu_neuron_seconds
        some = int(min(max((behind - fixed) / max(each, 1e-15), 0.0), window))
        if misses > min(slots - hits, window) or beside < 0:
            return some, slowed, 0.0
        moved = min(some, misses)
        part = max(gpu + moved * costs.gpu_neuron_seconds, cpu - moved * saved + merge)
        copied, alone = fixed + misses * link, gpu + misses * costs.gpu_neuron_seconds
        return some, slowed, part - (max(alone, copied - beside) if self.hidden else copied + alone)

    def step(self, resident, active, window, future):
        costs, trailing = self.beliefs.costs, self.beliefs.lag > 0
        saved = max(costs.cpu_neuron_seconds, 1e-15)
        uses = self.judge(active)
        misses = len(active - resident)
        some, cost, whole = self.room(len(resident), len(active & resident), misses, window)
        unit = self.clock / self.horizon
        ahead = max(1.0, min(uses / max(1.0 - uses, 0.01), self.horizon)) if trailing else 1.0
        now = int(ahead * unit + 0.5)
        outside = set(self.count) - resident

        def valued(cost):
            margin = int(min(cost / saved * unit + 0.5, 255.0))
            return {
                i: min(min(f + now * (i in active), 255) + margin * (i in resident), 255)
                for i, f in self.count.items()
            }

        def gaining(value):
            return gainful([value[i] for i in outside], [value[i] for i in resident])

        link, value = costs.link_neuron_seconds, valued(cost)
        n = min(some, gaining(value))
        if n == some and not self.hidden:
            value = valued(link)
            n = max(n, min(window, gaining(value)))
        make_whole = whole > 0 and whole + misses * self.horizon * uses * saved > 0
        n = max(n, misses) if make_whole else n
        fetch, evict = best(outside, n, value.get), best(resident, n, lambda i: -value[i])
        self.fetched, self.evicted = set(fetch), set(evict)
        gain = 0 if trailing else len(self.fetched & active) - len(self.evicted & active)
        spent = min(n, some) * cost + max(n - some, 0) * link + costs.prefetch_fixed_seconds
        pays = make_whole or (gain + n * self.horizon * uses) * saved > spent
        self.count = {i: min(f + (i in active), 63) for i, f in self.count.items()}
        self.clock += 1
        if self.clock == 64:
            self.clock = 32
            self.count = {i: f // 2 for i, f in self.count.items()}
        return (fetch, evict) if pays else ([], [])


class NaiveBelady:
    """The next use while the window is wide enough for all that is missing, else all uses to come."""

    def __init__(self, case, cache) -> None:
        self.everyone = set(range(case.neurons))

    def step(self, resident, active, window, future):
        missing, spare = active - resident, resident - active
        if len(missing) > window:
            return self.by_worth(resident, [active, *future], window)

        def next_use(i):
            return next((t for t, later in enumerate(future) if i in later), NEVER)

        n = min(len(missing), len(spare))
        fetch = best(missing, n, lambda i: -next_use(i))
        if n < window and future:
            ahead = future[0] - resident - set(fetch)
            early = min(len(ahead) - window, window - n, len(spare - future[0]) - n)
            later = {i: next((t for t, later in enumerate(future[1:]) if i in later), NEVER) for i in ahead}
            fetch = sorted({*fetch, *best(ahead, early, lambda i: -later[i])})
        return fetch, best(spare, len(fetch), next_use)

    def by_worth(self, resident, tokens, window):
        half = max(min(int(len(resident) / (14.0 * max(window, 1)) + 0.5), 16), 1)
        use = 11 - int(np.ceil(np.log2(half)))
        worth = dict.fromkeys(self.everyone, 0)
        for t in reversed(range(min(len(tokens), (use + 1) * half, 65))):
            if (t + 1) % half == 0:
                worth = {i: value // 2 for i, value in worth.items()}
            # the counter above the use bit saturates by itself
            worth = {
                i: value + (2**use if i in tokens[t] and value >> use < 2 ** (12 - use) - 1 else 0)
                for i, value in worth.items()
            }
        outside = self.everyone - resident
        n = min(window, gainful([worth[i] for i in outside], [worth[i] for i in resident]))
        idle = {i for i in resident if not worth[i]}
        if len(idle) >= n:
            last = {i: next((t for t, later in enumerate(tokens[1:]) if i in later), NEVER) for i in idle}
            evict = best(idle, n, last.get)
        else:
            evict = best(resident, n, lambda i: -worth[i])
        return best(outside, n, worth.get), evict


RULES = {
    "belady": NaiveBelady,
    "lfu": NaiveLfu,
    "random": NaiveRandom,
    "s3fifo": NaiveS3Fifo,
    "time_saved": NaiveTimeSaved,
}
