/*
 * The GPU's MIG instances: which of them exist, which of them this process may see, and which more
 * fit. Two GPU instances fit together if their memory slices do not overlap, if together they need
 * no more engines of a kind than the whole GPU has, and if no profile exceeds its instancesMax.
 */
#include "sim.h"

struct sim_instance sim_unpack(uint64_t word)
{
    return (struct sim_instance){
        .exists = (word & NVMLSIM_INSTANCE) != 0,
        .profile = word & 0xffff,
        .start = (word >> 16) & 0xff,
        .size = (word >> 24) & 0xff,
    };
}

uint64_t sim_pack(unsigned int profile, unsigned int start, unsigned int size)
{
    return NVMLSIM_INSTANCE | (uint64_t)(size & 0xff) << 24 | (uint64_t)(start & 0xff) << 16 | (profile & 0xffff);
}

unsigned int sim_syspipe(uint64_t word) { return (word >> 32) & 0xff; }

uint64_t sim_next_syspipe(const struct nvmlsim_gpu *gpu)
{
    uint64_t used = 0;
    for (unsigned int gi = 0; gi < NVMLSIM_GPU_INSTANCES; gi++)
        for (unsigned int ci = 0; ci < NVMLSIM_COMPUTE_INSTANCES; ci++)
            if (sim_ci(gpu, gi, ci).exists)
                used |= UINT64_C(1) << (sim_syspipe(LOAD(gpu->compute_instances[gi][ci])) & 63);
    uint64_t pipe = 1;
    while (used >> pipe & 1)
        pipe++;
    return pipe << 32;
}

struct sim_instance sim_gi(const struct nvmlsim_gpu *gpu, unsigned int id)
{
    return sim_unpack(id < NVMLSIM_GPU_INSTANCES ? LOAD(gpu->instances[id]) : 0);
}

struct sim_instance sim_ci(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int id)
{
    if (id >= NVMLSIM_COMPUTE_INSTANCES || !sim_gi(gpu, gi).exists)
        return sim_unpack(0);
    return sim_unpack(LOAD(gpu->compute_instances[gi][id]));
}

bool sim_has_instances(const struct nvmlsim_gpu *gpu)
{
    for (unsigned int id = 0; id < NVMLSIM_GPU_INSTANCES; id++)
        if (sim_gi(gpu, id).exists)
            return true;
    return false;
}

bool sim_has_compute_instances(const struct nvmlsim_gpu *gpu, unsigned int gi)
{
    for (unsigned int id = 0; id < NVMLSIM_COMPUTE_INSTANCES; id++)
        if (sim_ci(gpu, gi, id).exists)
            return true;
    return false;
}

bool sim_is_busy(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci)
{
    for (unsigned int i = 0; i < NVMLSIM_PROCESSES; i++) {
        uint64_t process = LOAD(gpu->processes[i]);
        if (process == 0)
            continue;
        unsigned int on_gi = (process >> 16) & 0xffff, on_ci = process & 0xffff;
        if (gi == NVMLSIM_NO_INSTANCE || on_gi == NVMLSIM_NO_INSTANCE || (on_gi == gi && on_ci == ci))
            return true;
    }
    unsigned int number = (unsigned int)(gpu - sim_gpu_at(0));
    if (gi == NVMLSIM_NO_INSTANCE)
        return sim_computed_on(number, 0);
    return sim_computed_on(number, 1 + gi * (1 + NVMLSIM_COMPUTE_INSTANCES) + ci);
}

/*
 * The driver numbers its capabilities by one counter: two for MIG as a whole, then for every GPU 15
 * GPU instances, each with 8 compute instances (open-gpu-kernel-modules,
 * kernel-open/nvidia/nv-caps.c).
 */
unsigned int sim_gi_minor(const struct nvmlsim_gpu *gpu, unsigned int gi)
{
    return 3 + (gpu->minor * NVMLSIM_GPU_INSTANCES + gi) * (1 + NVMLSIM_COMPUTE_INSTANCES);
}

unsigned int sim_ci_minor(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci)
{
    return sim_gi_minor(gpu, gi) + 1 + ci;
}

/* A process with the capability to configure or to monitor MIG sees every MIG instance. */
static bool sees_everything(void)
{
    enum { CONFIG = 1, MONITOR = 2 };
    return sim_capability_opens(CONFIG) || sim_capability_opens(MONITOR);
}

bool sim_gi_visible(const struct nvmlsim_gpu *gpu, unsigned int gi)
{
    return sees_everything() || sim_capability_opens(sim_gi_minor(gpu, gi));
}

bool sim_ci_visible(const struct nvmlsim_gpu *gpu, unsigned int gi, unsigned int ci)
{
    return sees_everything() || (sim_capability_opens(sim_gi_minor(gpu, gi)) && sim_capability_opens(sim_ci_minor(gpu, gi, ci)));
}

const struct nvmlsim_profile *sim_profile_by_id(const struct nvmlsim_model *model, unsigned int id)
{
    for (unsigned int i = 0; i < model->profile_count && i < NVMLSIM_PROFILES; i++)
        if (model->profiles[i].id == id)
            return &model->profiles[i];
    return NULL;
}

enum { ENGINES = 5 };

static void engines_of(const struct nvmlsim_profile *profile, unsigned int engines[ENGINES])
{
    engines[0] = profile->copy_engines;
    engines[1] = profile->decoders;
    engines[2] = profile->encoders;
    engines[3] = profile->jpeg_engines;
    engines[4] = profile->ofa_engines;
}

/*
 * A copy of the GPU's memory slices, engines and profile counts in use, for counting what else
 * fits.
 */
struct occupation {
    uint64_t memory; /* one bit for each memory slice */
    unsigned int engines[ENGINES];
    unsigned int used[NVMLSIM_PROFILES];
};

static uint64_t slices(unsigned int start, unsigned int size) { return ((UINT64_C(1) << (size & 31)) - 1) << (start & 31); }

static void occupy(struct occupation *o, const struct nvmlsim_model *model, const struct nvmlsim_profile *profile, unsigned int start)
{
    unsigned int engines[ENGINES];
    engines_of(profile, engines);
    o->memory |= slices(start, profile->placement_size);
    for (unsigned int i = 0; i < ENGINES; i++)
        o->engines[i] += engines[i];
    o->used[profile - model->profiles]++;
}

static struct occupation occupation_of(const struct nvmlsim_gpu *gpu)
{
    struct occupation o = {0};
    const struct nvmlsim_model *model = sim_model(gpu);
    for (unsigned int id = 0; id < NVMLSIM_GPU_INSTANCES; id++) {
        struct sim_instance gi = sim_gi(gpu, id);
        const struct nvmlsim_profile *profile = gi.exists ? sim_profile_by_id(model, gi.profile) : NULL;
        if (profile)
            occupy(&o, model, profile, gi.start);
    }
    return o;
}

static bool fits(const struct occupation *o, const struct nvmlsim_model *model, const struct nvmlsim_profile *profile, unsigned int start)
{
    unsigned int engines[ENGINES], of_any[ENGINES], whole[ENGINES] = {0};
    if (o->memory & slices(start, profile->placement_size) || o->used[profile - model->profiles] >= profile->instances_max)
        return false;
    /* The whole GPU has as many engines as its largest profile. */
    for (unsigned int i = 0; i < model->profile_count && i < NVMLSIM_PROFILES; i++) {
        engines_of(&model->profiles[i], of_any);
        for (unsigned int kind = 0; kind < ENGINES; kind++)
            if (of_any[kind] > whole[kind])
                whole[kind] = of_any[kind];
    }
    engines_of(profile, engines);
    for (unsigned int kind = 0; kind < ENGINES; kind++)
        if (o->engines[kind] + engines[kind] > whole[kind])
            return false;
    return true;
}

static unsigned int placements(const struct nvmlsim_profile *profile)
{
    return profile->placement_count < NVMLSIM_PLACEMENTS ? profile->placement_count : NVMLSIM_PLACEMENTS;
}

bool sim_gi_fits(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile, unsigned int start)
{
    struct occupation o = occupation_of(gpu);
    return fits(&o, sim_model(gpu), profile, start);
}

unsigned int sim_gi_capacity(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile)
{
    struct occupation o = occupation_of(gpu);
    unsigned int count = 0;
    for (unsigned int i = 0; i < placements(profile); i++)
        if (fits(&o, sim_model(gpu), profile, profile->placement_starts[i])) {
            occupy(&o, sim_model(gpu), profile, profile->placement_starts[i]);
            count++;
        }
    return count;
}

/* Returns how many placements that fit now would no longer fit after a GPU instance at start. */
static unsigned int cost(const struct occupation *before, const struct nvmlsim_model *model, const struct nvmlsim_profile *profile,
                         unsigned int start)
{
    struct occupation after = *before;
    occupy(&after, model, profile, start);
    unsigned int lost = 0;
    for (unsigned int i = 0; i < model->profile_count && i < NVMLSIM_PROFILES; i++)
        for (unsigned int j = 0; j < placements(&model->profiles[i]); j++) {
            unsigned int other = model->profiles[i].placement_starts[j];
            lost += fits(before, model, &model->profiles[i], other) && !fits(&after, model, &model->profiles[i], other);
        }
    return lost;
}

/*
 * Chooses the placement that leaves the most other placements free. A real H100 put seven 1g at 6,
 * 4, 5, 0, 1, 2, 3.
 */
int sim_gi_choose(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile)
{
    struct occupation o = occupation_of(gpu);
    const struct nvmlsim_model *model = sim_model(gpu);
    int best = -1;
    unsigned int least = 0;
    for (unsigned int i = 0; i < placements(profile); i++) {
        unsigned int start = profile->placement_starts[i];
        if (!fits(&o, model, profile, start))
            continue;
        unsigned int lost = cost(&o, model, profile, start);
        if (best < 0 || lost < least) {
            best = (int)start;
            least = lost;
        }
    }
    return best;
}

/*
 * Returns the ID of a new GPU instance. IDs follow the share of the memory: the whole has 0, halves
 * 1 and 2, quarters 3 to 6, eighths 7 to 14, each in the order of their placements.
 */
int sim_gi_id(const struct nvmlsim_gpu *gpu, const struct nvmlsim_profile *profile, unsigned int start)
{
    unsigned int whole = sim_model(gpu)->memory_slices, first = 0;
    for (unsigned int parts = 8; parts >= 1; parts /= 2) {
        unsigned int span = whole / parts;
        if (span == 0 || span < profile->placement_size)
            continue;
        first = parts - 1;
        unsigned int id = first + start / span;
        if (id < NVMLSIM_GPU_INSTANCES && !sim_gi(gpu, id).exists)
            return (int)id;
        break;
    }
    for (unsigned int id = first; id < NVMLSIM_GPU_INSTANCES; id++) /* the usual ID is taken, or no share fits the profile */
        if (!sim_gi(gpu, id).exists)
            return (int)id;
    return -1;
}
