/* The step's seconds for many placements: planner/seconds.py line by line, every operation one IEEE double rounding.
 *
 * That file says what is simulated and why. Here a placement is a code of bits (planner/counts.py), and the layers are in
 * the order of their stages. Names are those of seconds.py. */

#ifndef OFFLOADKIT_CPU_PLAN_H
#define OFFLOADKIT_CPU_PLAN_H

#include <stdint.h>

enum { STREAMED = 1, KEEPS = 2, ON_GPU = 4, ON_DISK = 8, IN_VRAM = 16 };

struct layer_cost {
    double weight_bytes, stepped_bytes, sent_bytes, gradient_bytes, state_bytes, num_chunks, cpu_step, gpu_step, bucket,
        adding_in_vram, adding_in_ram, norm_in_ram, exchange, sums_exchange, summing_in_vram, copied, gather;
};

struct stage_cost {
    double forward, backward, forward_launches, backward_launches, operation_launches, again, again_launches,
        is_captured, graphed_forward_launches, graphed_backward_launches, input_bytes;
};

struct plan_machine {
    double h2d, d2h, both, cpu_and_bus, launch_seconds, disk_read, disk_write, cpu_rate;
    /* and the constants of seconds.py and layout.py */
    double chunk_launches, disk_overlap, recomputed_forward, recomputed_backward, streamed_forward, streamed_backward,
        cheap_forward, cheap_backward, layer_launches, thread_slows, slowed_beside_cpu;
    double num_weight_buffers, num_gradient_buckets, num_staging, num_step_buffers;
    double shares_cores; /* whether Python and the CPU's step share the cores */
    double accumulation;
    double agreeing; /* seconds of an update that several ranks take to agree */
    double link_is_bus, link;
    double num_trained; /* layers that are not frozen */
    double link_in_backward;
};

struct plan_model {
    const struct plan_machine *machine;
    const struct stage_cost *stages;
    const struct layer_cost *layers;
    const int64_t *ends;   /* of each stage's layers */
    const int64_t *blocks; /* of each layer; -1: none */
    int64_t num_stages, num_layers;
};

/* Room for what one simulation remembers: num_stages + 3 * num_layers numbers, and num_layers copies. */
struct plan_memory {
    double *ends, *sent, *added, *staged;
    double *starts, *seconds; /* copies to VRAM that the ring has not met yet */
};

struct candidate {
    const int64_t *codes;
    int64_t recomputed, offloaded, cheap;
};

struct queues {
    double gpu, cores, h2d, d2h, disk, launches, link;
    double busy_forward, busy_cores;
    double slow_until[2], slow_factor[2];
    int shares_cores;
};

static inline double larger(double a, double b) { return b > a ? b : a; }
static inline double smaller(double a, double b) { return b < a ? b : a; }

static inline double plan_take(double *free, double seconds, double ready) {
    *free = (*free > ready ? *free : ready) + seconds;
    return *free;
}

static inline double *plan_python(struct queues *q) { return q->shares_cores ? &q->cores : &q->launches; }

/* seconds.Queues._slowed; what slows nothing ends at 0 */
static inline double plan_slowed(const struct queues *q, double seconds, double began) {
    double took = 0.0;
    for (int i = 0; i < 2; i++) {
        double room = q->slow_until[i] - (began + took);
        if (room <= 0.0) continue;
        if (q->slow_factor[i] * seconds <= room) return took + q->slow_factor[i] * seconds;
        took += room;
        seconds -= room / q->slow_factor[i];
    }
    return took + seconds;
}

static inline double plan_launched(struct queues *q, double seconds, double ready) {
    double *python = plan_python(q), took = plan_slowed(q, seconds, larger(*python, ready));
    q->gpu = larger(q->gpu, plan_take(python, took, ready));
    return q->gpu;
}

static inline double plan_cores(struct queues *q, double seconds, double ready) {
    q->busy_cores += seconds;
    return plan_take(&q->cores, seconds, ready);
}

static inline double plan_last(const struct queues *q) {
    double last = larger(larger(q->gpu, q->cores), larger(q->h2d, q->d2h));
    return larger(last, larger(larger(q->disk, q->launches), q->link));
}

static inline int states_in_vram(int64_t code) { return (code & IN_VRAM) != 0; }
static inline int weights_in_ram(int64_t code) { return (code & STREAMED) != 0; }
static inline int gradients_in_ram(int64_t code) { return !(code & (IN_VRAM | KEEPS)); }
static inline int steps_on_cpu(int64_t code) { return !(code & (IN_VRAM | ON_GPU)); }

static inline int plan_recomputes(const struct plan_model *model, const struct candidate *of, int64_t at) {
    return model->blocks[at] >= 0 && model->blocks[at] < of->recomputed;
}

static inline int plan_offloads(const struct plan_model *model, const struct candidate *of, int64_t at) {
    return plan_recomputes(model, of, at) && model->blocks[at] < of->offloaded;
}

static inline int plan_is_cheap(const struct plan_model *model, const struct candidate *of, int64_t at) {
    return model->blocks[at] >= of->recomputed && model->blocks[at] < of->recomputed + of->cheap;
}

static inline void plan_transfer(const struct layer_cost *layer, int64_t code, double *there, double *back) {
    *back = layer->state_bytes + (weights_in_ram(code) ? layer->stepped_bytes : 0.0);
    *there = *back + (gradients_in_ram(code) ? layer->gradient_bytes : 0.0);
}

struct plan_bus {
    double h2d, d2h, slows_cores;
};

static inline double plan_mean_rate(double num_bytes, double rate, double together, double share) {
    return num_bytes != 0.0 ? num_bytes / (together + (num_bytes - together * rate * share) / rate) : rate;
}

static inline struct plan_bus plan_beside_link(const struct plan_machine *m, struct plan_bus bus, double num_bytes,
                                               double h2d_bytes, double d2h_bytes) {
    if (m->link_is_bus == 0.0) return bus;
    bus.h2d *= h2d_bytes != 0.0 ? h2d_bytes / (h2d_bytes + num_bytes) : 1.0;
    bus.d2h *= d2h_bytes != 0.0 ? d2h_bytes / (d2h_bytes + num_bytes) : 1.0;
    return bus;
}

static struct plan_bus plan_bus_in_update(const struct plan_model *model, const struct candidate *of, int updates) {
    const struct plan_machine *m = model->machine;
    struct plan_bus bus = {m->h2d, m->d2h, 1.0};
    int any = 0;
    for (int64_t at = 0; at < model->num_layers; at++)
        any |= !states_in_vram(of->codes[at]) && (of->codes[at] & ON_GPU);
    if (!updates || !(any || m->link_is_bus != 0.0)) return bus;
    double h2d_bytes = 0.0, d2h_bytes = 0.0, cpu_seconds = 0.0, linked = 0.0;
    for (int64_t stage = 0, at = 0; stage < model->num_stages; stage++) {
        int offloads = 0;
        for (; at < model->ends[stage]; at++) {
            const struct layer_cost *layer = &model->layers[at];
            int64_t code = of->codes[at];
            if (steps_on_cpu(code)) {
                cpu_seconds += layer->cpu_step;
            } else if (!states_in_vram(code)) {
                double there, back;
                plan_transfer(layer, code, &there, &back);
                h2d_bytes += there;
                d2h_bytes += back;
            }
            if (weights_in_ram(code)) {
                h2d_bytes += layer->weight_bytes;
            } else {
                h2d_bytes += steps_on_cpu(code) ? layer->stepped_bytes : 0.0;
                linked += layer->gather;
            }
            offloads |= plan_offloads(model, of, at);
        }
        if (offloads) d2h_bytes += model->stages[stage].input_bytes;
    }
    if (any) {
        double share = smaller(1.0, m->both / (m->h2d + m->d2h));
        double together = smaller(h2d_bytes / (m->h2d * share), d2h_bytes / (m->d2h * share));
        double h2d = plan_mean_rate(h2d_bytes, m->h2d, together, share);
        double d2h = plan_mean_rate(d2h_bytes, m->d2h, together, share);
        double bus_seconds = larger(h2d_bytes / h2d, d2h_bytes / d2h), cores_slower = 1.0, bus_slower = 1.0;
        if (cpu_seconds != 0.0 && bus_seconds != 0.0) {
            double slower = larger(1.0, (m->cpu_rate + (h2d_bytes + d2h_bytes) / bus_seconds) / m->cpu_and_bus);
            cores_slower = smaller(slower, 1.0 + (slower - 1.0) * bus_seconds / cpu_seconds);
            bus_slower = smaller(slower, 1.0 + (slower - 1.0) * cpu_seconds / bus_seconds);
        }
        bus = (struct plan_bus){h2d / bus_slower, d2h / bus_slower, cores_slower};
    }
    return plan_beside_link(m, bus, linked * m->link, h2d_bytes, d2h_bytes);
}

/* seconds.Ring: its heap is a list here, of which the least is taken. */
struct plan_ring {
    double h2d, d2h;
    int64_t num_others;
};

static double plan_ring_step(struct plan_ring *ring, struct plan_memory *memory, double h2d, double d2h, double kernel,
                             double num_chunks, double num_buffers, double *back_in_ram) {
    double began = ring->h2d, stepped = began + h2d + kernel;
    for (;;) {
        int64_t least = -1;
        for (int64_t i = 0; i < ring->num_others; i++)
            if (least < 0 || memory->starts[i] < memory->starts[least] ||
                (memory->starts[i] == memory->starts[least] && memory->seconds[i] < memory->seconds[least]))
                least = i;
        if (least < 0 || memory->starts[least] > stepped) break;
        stepped += memory->seconds[least];
        ring->num_others--;
        memory->starts[least] = memory->starts[ring->num_others];
        memory->seconds[least] = memory->seconds[ring->num_others];
    }
    double back = larger(ring->d2h, began + (h2d + kernel) / num_chunks) + d2h;
    back = larger(back, stepped + d2h / num_chunks);
    ring->h2d = larger(stepped, back - (num_buffers - 1.0) * d2h / num_chunks);
    ring->d2h = back;
    *back_in_ram = back;
    return stepped;
}

/* seconds._slowing */
static void plan_slowing(const struct plan_model *model, const struct candidate *of, struct plan_bus bus, double norm,
                         struct queues *q) {
    const struct plan_machine *m = model->machine;
    if (m->shares_cores != 0.0) return;
    double stepped = norm, there = 0.0, back = 0.0, on_cpu = 0.0, through_vram = 0.0;
    for (int64_t at = 0; at < model->num_layers; at++) {
        const struct layer_cost *layer = &model->layers[at];
        int64_t code = of->codes[at];
        if (steps_on_cpu(code)) {
            on_cpu = m->slowed_beside_cpu;
            stepped += bus.slows_cores * layer->cpu_step;
        } else if (!states_in_vram(code)) {
            double h2d_bytes, d2h_bytes;
            plan_transfer(layer, code, &h2d_bytes, &d2h_bytes);
            through_vram = m->thread_slows;
            there += h2d_bytes / bus.h2d;
            back += d2h_bytes / bus.d2h;
        }
    }
    double streamed = larger(there, back);
    int stepped_first = stepped < streamed;
    q->slow_until[0] = stepped_first ? stepped : streamed;
    q->slow_factor[0] = 1.0 + on_cpu + through_vram;
    q->slow_until[1] = stepped_first ? streamed : stepped;
    q->slow_factor[1] = 1.0 + (stepped_first ? through_vram : on_cpu);
}

static struct queues plan_forward(const struct plan_model *model, const struct candidate *of, struct plan_memory *memory,
                                  int updates) {
    const struct plan_machine *m = model->machine;
    struct queues q = {.shares_cores = m->shares_cores != 0.0};
    struct plan_ring ring = {0.0, 0.0, 0};
    struct plan_bus bus = plan_bus_in_update(model, of, updates);
    int64_t num_buffers = (int64_t)m->num_weight_buffers, num_ends = 0;
    if (updates) {
        double norm = 0.0;
        for (int64_t at = 0; at < model->num_layers; at++)
            if (gradients_in_ram(of->codes[at])) norm += model->layers[at].norm_in_ram;
        plan_cores(&q, norm, 0.0);
        plan_slowing(model, of, bus, norm, &q);
    }
    double before = 0.0, resident = 0.0;
    for (int64_t stage = 0, at = 0; stage < model->num_stages; stage++) {
        const struct stage_cost *unit = &model->stages[stage];
        double ready = 0.0, on_gpu = 0.0, cpu_done = 0.0, gathered = 0.0, num_streamed = 0.0, copied = 0.0;
        int recomputes = 0, offloads = 0, is_cheap = 0;
        for (; at < model->ends[stage]; at++) {
            const struct layer_cost *layer = &model->layers[at];
            int64_t code = of->codes[at];
            double stepped = 0.0, on_device = 0.0;
            is_cheap |= plan_is_cheap(model, of, at);
            if (plan_recomputes(model, of, at)) {
                recomputes = 1;
                offloads = plan_offloads(model, of, at);
            }
            if (updates && steps_on_cpu(code)) {
                double read = 0.0;
                if (code & ON_DISK) {
                    double seconds = layer->state_bytes / m->disk_read + layer->state_bytes / m->disk_write;
                    read = plan_take(&q.disk, m->disk_overlap * seconds, 0.0);
                }
                stepped = plan_cores(&q, bus.slows_cores * layer->cpu_step, read);
                cpu_done = larger(cpu_done, stepped);
            } else if (updates && !states_in_vram(code)) {
                double there, back;
                plan_transfer(layer, code, &there, &back);
                plan_take(plan_python(&q), m->chunk_launches * layer->num_chunks * m->launch_seconds, 0.0);
                plan_take(&q.gpu, layer->gpu_step, 0.0);
                on_device = plan_ring_step(&ring, memory, there / bus.h2d, back / bus.d2h, layer->gpu_step,
                                           layer->num_chunks, m->num_step_buffers, &stepped);
                ready = larger(ready, on_device);
            } else if (updates) {
                on_gpu += layer->gpu_step;
                resident += layer->gpu_step;
                on_device = resident;
            }
            int in_ram = weights_in_ram(code);
            double fetched = (in_ram ? layer->weight_bytes : layer->stepped_bytes) / bus.h2d, is_free = 0.0;
            if (in_ram) {
                num_streamed += 1.0;
                copied += layer->copied;
                if (!(updates && !states_in_vram(code)) && num_ends < num_buffers) continue;
                is_free = larger(before, num_ends >= num_buffers ? memory->ends[num_ends - num_buffers] : 0.0);
            } else if (!(updates && steps_on_cpu(code))) {
                if (updates && layer->gather != 0.0)
                    gathered = larger(gathered, plan_take(&q.link, layer->gather, on_device));
                continue;
            }
            double arrived = plan_take(&q.h2d, fetched, larger(stepped, is_free));
            memory->starts[ring.num_others] = arrived - fetched;
            memory->seconds[ring.num_others++] = fetched;
            ready = larger(ready, arrived);
            if (!in_ram && layer->gather != 0.0)
                gathered = larger(gathered, plan_take(&q.link, layer->gather, arrived));
        }
        before = larger(larger(q.gpu, ready), gathered);
        plan_take(&q.gpu, on_gpu, ready);
        int as_graph = unit->is_captured != 0.0 && !is_cheap;
        double seconds = as_graph ? unit->forward + copied : unit->forward;
        plan_take(&q.gpu, seconds, larger(ready, gathered));
        q.busy_forward += seconds;
        double launches = as_graph ? unit->graphed_forward_launches : unit->forward_launches;
        if (!as_graph) {
            launches += recomputes * m->recomputed_forward * unit->operation_launches;
            launches += is_cheap * m->cheap_forward * unit->operation_launches;
        }
        launches += num_streamed * m->streamed_forward * m->launch_seconds;
        double end = plan_launched(&q, launches, cpu_done);
        if (num_streamed != 0.0) memory->ends[num_ends++] = end;
        if (offloads) {
            plan_take(&q.d2h, unit->input_bytes / bus.d2h, before);
            ring.d2h += unit->input_bytes / bus.d2h;
        }
    }
    return q;
}

/* seconds._bus */
static struct plan_bus plan_bus_in_backward(const struct plan_model *model, const struct candidate *of, int is_last) {
    const struct plan_machine *m = model->machine;
    int fetches = 0, sends = 0;
    double fetched = 0.0, sent = 0.0, linked = 0.0;
    for (int64_t stage = 0, at = 0; stage < model->num_stages; stage++) {
        int offloads = 0;
        for (; at < model->ends[stage]; at++) {
            const struct layer_cost *layer = &model->layers[at];
            int64_t code = of->codes[at];
            int in_ram = gradients_in_ram(code);
            fetches |= weights_in_ram(code);
            sends |= in_ram;
            offloads |= plan_offloads(model, of, at);
            fetched += weights_in_ram(code) ? layer->weight_bytes : 0.0;
            sent += in_ram ? layer->sent_bytes : 0.0;
            linked += layer->exchange + (is_last && !in_ram ? layer->sums_exchange : 0.0);
        }
        fetches |= offloads;
        if (offloads) fetched += model->stages[stage].input_bytes;
    }
    double share = fetches && sends ? smaller(1.0, m->both / (m->h2d + m->d2h)) : 1.0;
    struct plan_bus bus = {m->h2d * share, m->d2h * share, 1.0};
    return plan_beside_link(m, bus, linked * m->link_in_backward, fetched, sent);
}

/* seconds.Staging */
struct plan_staging {
    double free;
    int64_t oldest, number;
};

static double plan_stage(struct plan_staging *staging, const struct plan_memory *memory, double num_bytes) {
    double is_free = 0.0;
    while (staging->free < num_bytes) {
        is_free = memory->added[staging->oldest];
        staging->free += memory->staged[staging->oldest++];
    }
    staging->free -= num_bytes;
    return is_free;
}

static struct queues plan_backward(const struct plan_model *model, const struct candidate *of,
                                   struct plan_memory *memory, int is_last) {
    const struct plan_machine *m = model->machine;
    struct queues q = {.shares_cores = m->shares_cores != 0.0};
    int adds = m->accumulation > 1.0;
    struct plan_bus bus = plan_bus_in_backward(model, of, is_last);
    double h2d = bus.h2d, d2h = bus.d2h, before = 0.0, drained = 0.0;
    int64_t num_buffers = (int64_t)m->num_weight_buffers, num_buckets = (int64_t)m->num_gradient_buckets;
    int64_t num_streamed = 0, num_ends = 0, num_sent = 0;
    struct plan_staging staging = {0.0, 0, 0};
    for (int64_t at = 0; at < model->num_layers; at++)
        if (gradients_in_ram(of->codes[at])) staging.free = larger(staging.free, model->layers[at].sent_bytes);
    staging.free *= m->num_staging;
    for (int64_t stage = model->num_stages - 1; stage >= 0; stage--) {
        const struct stage_cost *unit = &model->stages[stage];
        int64_t first = stage ? model->ends[stage - 1] : 0;
        double ready = num_sent >= num_buckets ? memory->sent[num_sent - num_buckets] : 0.0;
        double fetched = 0.0, num_layers = 0.0, seconds = unit->backward, copied = 0.0;
        int recomputes = 0, offloads = 0, is_cheap = 0;
        for (int64_t at = first; at < model->ends[stage]; at++) {
            const struct layer_cost *layer = &model->layers[at];
            int64_t code = of->codes[at];
            if (weights_in_ram(code)) {
                fetched += layer->weight_bytes;
                num_layers += 1.0;
                copied += layer->copied;
            }
            if (plan_recomputes(model, of, at)) {
                recomputes = 1;
                offloads = plan_offloads(model, of, at);
            }
            is_cheap |= plan_is_cheap(model, of, at);
            seconds += layer->bucket;
            int exchanges = layer->exchange != 0.0;
            if (gradients_in_ram(code) ? exchanges && !adds : adds || exchanges) seconds += layer->adding_in_vram;
            if (is_last && !gradients_in_ram(code)) seconds += layer->summing_in_vram;
        }
        if (fetched != 0.0) {
            num_streamed++;
            if (num_streamed > num_buffers)
                ready = larger(ready, plan_take(&q.h2d, fetched / h2d, larger(before, memory->ends[num_ends - num_buffers])));
        }
        if (offloads) ready = larger(ready, plan_take(&q.h2d, unit->input_bytes / h2d, before));
        before = larger(q.gpu, ready);
        int as_graph = unit->is_captured != 0.0 && !is_cheap;
        double launches = as_graph ? unit->graphed_backward_launches : unit->backward_launches;
        launches += num_layers * m->streamed_backward * m->launch_seconds;
        if (as_graph) seconds += copied;
        if (recomputes) seconds += unit->forward;
        if (recomputes && !as_graph) {
            launches += unit->forward_launches;
            launches += m->recomputed_backward * unit->operation_launches;
        }
        if (is_cheap) {
            seconds += unit->again;
            launches += unit->again_launches;
            launches += m->cheap_backward * unit->operation_launches;
        }
        plan_take(&q.gpu, seconds, ready);
        double end = plan_launched(&q, launches, 0.0);
        if (fetched != 0.0) memory->ends[num_ends++] = end;
        for (int64_t at = first; at < model->ends[stage]; at++) {
            const struct layer_cost *layer = &model->layers[at];
            int in_ram = gradients_in_ram(of->codes[at]);
            double complete = end;
            if (is_last && layer->sums_exchange != 0.0 && !in_ram) plan_take(&q.link, layer->sums_exchange, end);
            if (layer->exchange != 0.0) {
                complete = plan_take(&q.link, layer->exchange, adds ? larger(end, drained) : end);
                memory->sent[num_sent++] = complete;
                if (in_ram && !adds) complete = q.link = larger(complete, drained);
            }
            if (!in_ram) continue;
            double *python = plan_python(&q);
            if (adds) *python = larger(*python, plan_stage(&staging, memory, layer->sent_bytes));
            drained = plan_take(&q.d2h, layer->sent_bytes / d2h, larger(complete, *python));
            if (layer->exchange == 0.0) memory->sent[num_sent++] = drained;
            if (!adds) continue;
            memory->staged[staging.number] = layer->sent_bytes;
            memory->added[staging.number++] = plan_cores(&q, layer->adding_in_ram, drained);
        }
    }
    if (is_last) {
        double done = plan_launched(&q, m->layer_launches * m->num_trained * m->launch_seconds, 0.0);
        done = larger(done, q.link);
        for (int64_t at = 0; at < model->num_layers; at++) {
            int64_t code = of->codes[at];
            if (steps_on_cpu(code) && !gradients_in_ram(code))
                plan_take(&q.d2h, model->layers[at].gradient_bytes / d2h, done);
        }
    }
    return q;
}

/* out: seconds of the update phase and of the backward phase, and how long forward and the CPU's step are busy. */
static void plan_seconds(const struct plan_model *model, const struct candidate *of, struct plan_memory *memory,
                         double out[4]) {
    double others = model->machine->accumulation - 1.0;
    struct queues first = plan_forward(model, of, memory, 1), last = plan_backward(model, of, memory, 1);
    out[0] = plan_last(&first) + model->machine->agreeing;
    out[1] = plan_last(&last);
    out[2] = first.busy_forward + last.busy_forward;
    out[3] = first.busy_cores + last.busy_cores;
    if (others == 0.0) return;
    struct queues forward = plan_forward(model, of, memory, 0), before = plan_backward(model, of, memory, 0);
    double between = plan_last(&forward), adding = before.cores;
    before.cores = 0.0;
    out[0] += others * between;
    out[1] += others * larger(plan_last(&before), adding - between);
    out[2] += others * (forward.busy_forward + before.busy_forward);
    out[3] += others * (forward.busy_cores + before.busy_cores);
}

#endif
