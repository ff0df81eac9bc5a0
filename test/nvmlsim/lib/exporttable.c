/*
 * The table of unnamed functions that nvidia-smi requests next to NVML's named ones.
 * 
 * It is not documented. The facts come from running nvidia-smi 535, 550 and 555 against a table of
 * 256 functions that only reported their calls. The slots are the same in all three:
 *   26        a trace callback that must not be written through
 *   81        handle by index
 *   192, 193  set a compute policy; list all of them: time_slice.c
 *   213-215   lists of processes
 * Every other slot succeeds. With a device and a pointer it writes 0 there: "none", "off".
 */
#include "sim.h"

#include <string.h>

enum { SLOTS = 256, SLOT_TRACE = 26, SLOT_HANDLE_BY_INDEX = 81, SLOT_SET_POLICY = 192, SLOT_LIST_POLICIES = 193 };

static bool is_device(const void *value)
{
    nvmlDevice_t device;
    _Static_assert(sizeof device == sizeof value, "a handle is as wide as a pointer");
    memcpy(&device, &value, sizeof device);
    struct sim_target target;
    return sim_find_device(device, &target) == NVML_SUCCESS;
}

static bool is_pointer(const void *value) { return (uintptr_t)value > 0x100000; }

static nvmlReturn_t called(unsigned int slot, void *first, void *second)
{
    if (slot == SLOT_HANDLE_BY_INDEX && (uintptr_t)first <= UINT16_MAX && is_pointer(second))
        return nvmlDeviceGetHandleByIndex_v2((unsigned int)(uintptr_t)first, second);
    if (slot == SLOT_SET_POLICY || slot == SLOT_LIST_POLICIES) {
        nvmlDevice_t device;
        memcpy(&device, &first, sizeof device);
        REQUIRE(is_pointer(second));
        return slot == SLOT_SET_POLICY ? sim_set_policy(device, second) : sim_list_policies(device, second);
    }
    if (slot != SLOT_TRACE && is_device(first) && is_pointer(second))
        *(unsigned int *)second = 0;
    return NVML_SUCCESS;
}

/*
 * A separate function for each slot, slot_00 to slot_ff, because a call can be identified only by
 * its slot.
 */
#define EACH_LOW(DO, high)                                                                                              \
    DO(high##0) DO(high##1) DO(high##2) DO(high##3) DO(high##4) DO(high##5) DO(high##6) DO(high##7) DO(high##8)         \
    DO(high##9) DO(high##a) DO(high##b) DO(high##c) DO(high##d) DO(high##e) DO(high##f)
#define EACH_SLOT(DO)                                                                                                   \
    EACH_LOW(DO, 0) EACH_LOW(DO, 1) EACH_LOW(DO, 2) EACH_LOW(DO, 3) EACH_LOW(DO, 4) EACH_LOW(DO, 5) EACH_LOW(DO, 6)     \
    EACH_LOW(DO, 7) EACH_LOW(DO, 8) EACH_LOW(DO, 9) EACH_LOW(DO, a) EACH_LOW(DO, b) EACH_LOW(DO, c) EACH_LOW(DO, d)     \
    EACH_LOW(DO, e) EACH_LOW(DO, f)

#define DEFINE(number) \
    static nvmlReturn_t slot_##number(void *first, void *second) { return called(0x##number, first, second); }
EACH_SLOT(DEFINE)

#define NAME(number) slot_##number,
static nvmlReturn_t (*const functions[SLOTS])(void *, void *) = {EACH_SLOT(NAME)};

NVMLSIM_API nvmlReturn_t nvmlInternalGetExportTable(const void **table, const unsigned char *id);
NVMLSIM_API nvmlReturn_t nvmlInternalGetExportTable(const void **table, const unsigned char *id)
{
    /* 6c3efec4-8fc9-4e6c-a327-ee696e12f7c4, as it lies in memory */
    static const unsigned char known[16] = {0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e,
                                            0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};
    static const void *slots[SLOTS];
    REQUIRE(table && id);
    if (memcmp(id, known, sizeof known) != 0)
        return NVML_ERROR_NOT_SUPPORTED;
    for (unsigned int i = 1; i < SLOTS; i++)
        memcpy(&slots[i], &functions[i], sizeof slots[i]);
    slots[0] = (const void *)(uintptr_t)0x1000; /* the table begins with its own size in bytes */
    *table = slots;
    return NVML_SUCCESS;
}
