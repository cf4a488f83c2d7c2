// How fast the simulation of one replica can be: the rules of plain_python.py (first come first served, least
// recently used, vLLM 0.19 without asynchronous scheduling) in C++, with leaps, for one core.
//
//     c++ -O3 -march=native -std=c++17 floor.cpp -o floor
//     ./floor LANES REPEATS < workload
//
// Lane i has i blocks fewer than the workload says. The workload is text: blocks, block size, most running calls,
// token budget, the four costs (ns: constant, a token, a sequence, a token of context), programs; then each
// program's arrival (ns) and number of calls, and each call's new tokens, output tokens and gap after it (ns).
//
// Prints the core time of each repeat (ns, all lanes), the totals of lane 0, and its calls, one a line.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <utility>
#include <vector>

using ns = int64_t;

struct Call {
    int new_tokens, output_tokens;
    ns gap;
};

struct Workload {
    std::vector<ns> arrival;
    std::vector<int> first_call, calls;  // of each program
    std::vector<Call> call;
};

struct Cluster {
    int blocks, block_size, max_running, budget;
    ns cost, cost_token, cost_sequence, cost_context;
};

struct Record {
    ns released, scheduled, first_token, finished;
    int cached, preemptions, resumed;
};

struct Totals {
    ns makespan = 0, busy = 0;
    int64_t iterations = 0, steps = 0, preemptions = 0, hit_tokens = 0, evicted_blocks = 0;
};

// What a program is doing, and what of it is in the pool. A program has at most one call at a time.
struct Program {
    int turn = 0;         // calls finished
    int context = 0;      // tokens after the last finished call
    int prompt = 0;       // of the current call
    int known = 0;        // tokens of the current call so far, prompt and output
    int computed = 0;     // of them, in the pool
    int left = 0;         // output tokens to come
    int blocks = 0;       // held
    int full_blocks = 0;  // held with content that can be found again
    bool is_new = true;   // the current call has not been preempted
    // once freed, the blocks with content are in the queue of eviction, behind those without
    int64_t idle_blocks = 0;
    int64_t blanks_before = 0;
    bool is_idle = false;
    int previous = -1, next = -1;
};

// The free blocks in the order in which they are taken: never used, then the freed contexts, oldest first.
class Pool {
  public:
    Pool(std::vector<Program>& programs, int blocks)
        : programs(programs), end(int(programs.size()) - 1), free(blocks), fresh(blocks) {
        programs[end].previous = programs[end].next = end;  // the last entry is the list's own
    }

    int64_t take(int64_t count) {  // returns how many blocks with content it cost
        int64_t evicted = 0, part = std::min(count, fresh);
        free -= count, fresh -= part, count -= part;
        while (count > 0) {
            int oldest = programs[end].next;
            if (oldest == end) {
                blanks -= count;
                break;
            }
            Program& from = programs[oldest];
            part = std::min<int64_t>(count, from.blanks_before);
            from.blanks_before -= part, count -= part;
            part = std::min<int64_t>(count, from.idle_blocks);
            from.idle_blocks -= part, count -= part, evicted += part;
            if (from.idle_blocks == 0) unlink(oldest);
        }
        return evicted;
    }

    void release(int index) {
        Program& program = programs[index];
        blanks += program.blocks - program.full_blocks, free += program.blocks;
        if (program.full_blocks) {
            program.idle_blocks = program.full_blocks, program.is_idle = true;
            program.previous = programs[end].previous, program.next = end;
            programs[program.previous].next = programs[end].previous = index;
            program.blanks_before = blanks, blanks = 0;
        }
        program.blocks = program.full_blocks = 0;
    }

    void reuse(int index) {  // the freed context of a program, by its next call
        unlink(index);
        free -= programs[index].idle_blocks, programs[index].idle_blocks = 0;
    }

    int64_t available() const { return free; }

  private:
    void unlink(int index) {
        Program& program = programs[index];
        int64_t& behind = program.next != end ? programs[program.next].blanks_before : blanks;
        behind += program.blanks_before;
        programs[program.previous].next = program.next, programs[program.next].previous = program.previous;
        program.blanks_before = 0, program.is_idle = false;
    }

    std::vector<Program>& programs;
    int end;
    int64_t free, fresh;
    int64_t blanks = 0;  // behind all contexts
};

template <class Condition>
int64_t first_that(int64_t low, int64_t high, Condition holds) {  // holds from some number on; at high without asking
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (holds(middle)) high = middle;
        else low = middle + 1;
    }
    return low;
}

class Simulation {
  public:
    Simulation(const Workload& workload, const Cluster& cluster, std::vector<Record>& records)
        : workload(workload), cluster(cluster), records(records), programs(workload.arrival.size() + 1),
          pool(programs, cluster.blocks) {
        for (size_t i = 0; i < workload.arrival.size(); i++) releases.push_back({workload.arrival[i], int(i)});
        std::make_heap(releases.begin(), releases.end(), std::greater<>());
    }

    Totals run() {
        while (true) {
            if (running.empty() && !waiting_calls()) {
                if (releases.empty()) break;
                now = std::max(now, releases.front().first);
            }
            release_calls();
            totals.steps++;
            schedule();
            if (batch.size()) iterate();
        }
        totals.makespan = now;
        return totals;
    }

  private:
    struct Part {  // of a batch
        int program, tokens;
    };

    int call_of(int index) const { return workload.first_call[index] + programs[index].turn; }
    bool waiting_calls() const { return front < waiting.size(); }
    int blocks_for(int64_t tokens) const { return int((tokens + cluster.block_size - 1) / cluster.block_size); }

    void release_calls() {
        while (!releases.empty() && releases.front().first <= now) {
            auto [released, index] = releases.front();
            std::pop_heap(releases.begin(), releases.end(), std::greater<>());
            releases.pop_back();
            Program& program = programs[index];
            const Call& call = workload.call[call_of(index)];
            program.prompt = program.known = program.context + call.new_tokens;
            program.left = call.output_tokens, program.computed = program.blocks = 0, program.is_new = true;
            records[call_of(index)] = {released, -1, -1, -1, 0, 0, 0};
            waiting.push_back(index);
        }
    }

    void grow(Program& program, int blocks, int64_t tokens) {
        totals.evicted_blocks += pool.take(blocks);
        program.blocks += blocks;
        program.full_blocks = std::max(program.full_blocks, int(tokens / cluster.block_size));
    }

    void preempt_last() {
        int index = running.back();
        running.pop_back();
        pool.release(index);
        programs[index].computed = 0, programs[index].is_new = false;
        records[call_of(index)].preemptions++, preempted++;
        if (front > 0) waiting[--front] = index;
        else waiting.insert(waiting.begin(), index);
    }

    // The batch of the next iteration, and whether something else than time keeps the first waiting call out.
    void schedule() {
        budget = cluster.budget, preempted = 0, blocked = false;
        batch.clear();
        for (size_t i = 0; i < running.size() && budget > 0; i++) {
            int index = running[i];
            Program& program = programs[index];
            int tokens = std::min(program.known - program.computed, budget), need = 0;
            while (true) {
                need = std::max(0, blocks_for(program.computed + tokens) - program.blocks);
                if (need <= pool.available() || running.size() <= i) break;
                preempt_last();
            }
            if (running.size() <= i) break;  // it was the last one itself
            grow(program, need, program.computed + tokens);
            batch.push_back({index, tokens});
            budget -= tokens;
        }
        if (!preempted) admit();
        if (!waiting_calls()) waiting.clear(), front = 0;
        totals.preemptions += preempted;
    }

    void admit() {
        while (waiting_calls() && budget > 0 && int(running.size()) < cluster.max_running) {
            int index = waiting[front];
            Program& program = programs[index];
            int most = (program.known - 1) / cluster.block_size;  // the last token is always computed
            int found = program.is_idle ? int(std::min<int64_t>(program.idle_blocks, most)) : 0;
            int cached = found * cluster.block_size, tokens = std::min(program.known - cached, budget);
            if (blocks_for(program.known) > pool.available()) {
                blocked = true;
                break;
            }
            if (found) pool.reuse(index);
            program.blocks = program.full_blocks = found, program.computed = cached;
            grow(program, blocks_for(cached + tokens) - found, cached + tokens);
            running.push_back(index), batch.push_back({index, tokens});
            front++, budget -= tokens;
            Record& record = records[call_of(index)];
            if (program.is_new) {
                record.scheduled = now, record.cached = cached, totals.hit_tokens += cached;
            } else {
                record.resumed += cached;
            }
            program.is_new = false;
        }
        if (int(running.size()) >= cluster.max_running) blocked = true;
    }

    // One iteration, or as many as nothing can change in: decodes only, no call comes, ends or needs a block too many.
    void iterate() {
        int64_t size = batch.size(), tokens = 0, context = 0;
        for (auto& part : batch) tokens += part.tokens, context += part.tokens + programs[part.program].computed;
        ns first = duration(tokens, size, context), second = duration(size, size, context + size);
        ns growth = cluster.cost_context * size;
        auto lasts = [&](int64_t n) { return first + (n - 1) * second + growth * ((n - 1) * (n - 2) / 2); };
        auto computed = [&](const Part& part, int64_t n) {
            return programs[part.program].computed + part.tokens + n - 1;
        };
        auto needs = [&](int64_t n) {
            int64_t blocks = 0;
            for (auto& part : batch) blocks += blocks_for(computed(part, n)) - programs[part.program].blocks;
            return blocks;
        };
        int64_t count = 1;
        if (!preempted && budget > 0 && (blocked || !waiting_calls()) && all_decode_next()) {
            count = programs[batch[0].program].left;
            for (auto& part : batch) count = std::min<int64_t>(count, programs[part.program].left);
            if (!blocked && !releases.empty()) {
                ns until = releases.front().first - now;
                count = first_that(1, count, [&](int64_t n) { return lasts(n) >= until; });
            }
            if (count > 1 && needs(count) > pool.available())
                count = first_that(1, count, [&](int64_t n) { return needs(n + 1) > pool.available(); });
            if (count > 1) {
                int64_t taken = 0;
                for (auto& part : batch) {
                    Program& program = programs[part.program];
                    int blocks = blocks_for(computed(part, count));
                    taken += blocks - program.blocks, program.blocks = blocks;
                    int full = int(computed(part, count) / cluster.block_size);
                    program.full_blocks = std::max(program.full_blocks, full);
                }
                totals.evicted_blocks += pool.take(taken);
            }
        }
        ns start = now;
        now += lasts(count), totals.busy += lasts(count), totals.iterations += count;
        bool is_any_finished = false;
        for (auto& part : batch) {
            Program& program = programs[part.program];
            program.computed += part.tokens + int(count) - 1;
            if (program.computed < program.known + count - 1) continue;  // a chunk of a prompt
            program.known += int(count), program.left -= int(count);
            Record& record = records[call_of(part.program)];
            if (record.first_token < 0) record.first_token = start + first;
            is_any_finished |= program.left == 0;
        }
        if (is_any_finished) finish_calls();
    }

    bool all_decode_next() const {
        for (auto& part : batch) {
            const Program& program = programs[part.program];
            if (program.computed + part.tokens < program.known) return false;
        }
        return true;
    }

    ns duration(int64_t tokens, int64_t sequences, int64_t context) const {
        return cluster.cost + cluster.cost_token * tokens + cluster.cost_sequence * sequences +
               cluster.cost_context * context;
    }

    void finish_calls() {
        size_t kept = 0;
        for (int index : running) {
            Program& program = programs[index];
            if (program.left) {
                running[kept++] = index;
                continue;
            }
            const Call& call = workload.call[call_of(index)];
            records[call_of(index)].finished = now;
            pool.release(index);
            program.context = program.prompt + call.output_tokens;
            if (++program.turn < workload.calls[index]) {
                releases.push_back({now + call.gap, index});
                std::push_heap(releases.begin(), releases.end(), std::greater<>());
            }
        }
        running.resize(kept);
    }

    const Workload& workload;
    const Cluster& cluster;
    std::vector<Record>& records;
    std::vector<Program> programs;
    Pool pool;
    std::vector<std::pair<ns, int>> releases;  // a heap, the next one in front
    std::vector<int> waiting, running;
    size_t front = 0;  // of the waiting calls
    std::vector<Part> batch;
    int budget = 0, preempted = 0;
    bool blocked = false;
    ns now = 0;
    Totals totals;
};

static void expect(bool is_read) {
    if (!is_read) std::fputs("floor: the workload breaks off\n", stderr), std::exit(1);
}

static ns core_time() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

int main(int count, char** arguments) {
    if (count != 3) return std::fputs("usage: floor LANES REPEATS < workload\n", stderr), 2;
    int lanes = std::atoi(arguments[1]), repeats = std::atoi(arguments[2]), programs;
    Cluster cluster;
    Workload workload;
    expect(std::scanf("%d %d %d %d %ld %ld %ld %ld %d", &cluster.blocks, &cluster.block_size, &cluster.max_running,
                      &cluster.budget, &cluster.cost, &cluster.cost_token, &cluster.cost_sequence,
                      &cluster.cost_context, &programs) == 9);
    for (int i = 0; i < programs; i++) {
        ns arrival;
        int calls;
        expect(std::scanf("%ld %d", &arrival, &calls) == 2);
        workload.arrival.push_back(arrival), workload.calls.push_back(calls);
        workload.first_call.push_back(int(workload.call.size()));
        for (int j = 0; j < calls; j++) {
            Call call;
            expect(std::scanf("%d %d %ld", &call.new_tokens, &call.output_tokens, &call.gap) == 3);
            workload.call.push_back(call);
        }
    }
    std::vector<Record> records(workload.call.size()), others(workload.call.size());
    Totals totals;
    for (int repeat = 0; repeat < repeats; repeat++) {
        ns start = core_time();
        for (int lane = 0; lane < lanes; lane++) {
            Cluster own = cluster;
            own.blocks -= lane;
            Totals result = Simulation(workload, own, lane ? others : records).run();
            if (!lane) totals = result;
        }
        std::printf("%ld%c", core_time() - start, repeat + 1 < repeats ? ' ' : '\n');
    }
    std::printf("%ld %ld %ld %ld %ld %ld\n", totals.iterations, totals.steps, totals.preemptions, totals.hit_tokens,
                totals.evicted_blocks, totals.makespan);
    for (auto& record : records)
        std::printf("%ld %ld %ld %ld %d %d %d\n", record.released, record.scheduled, record.first_token,
                    record.finished, record.cached, record.preemptions, record.resumed);
}
