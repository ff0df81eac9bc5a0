/* Counts the GPUs, and finds a GPU by index, UUID or PCI address. */
#include "sim.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

NVMLSIM_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    ENTER();
    REQUIRE(count);
    *count = sim_visible_count();
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

/* Returns the handle of a GPU that is visible, after the faults injected for that GPU. */
static nvmlReturn_t give_handle(const char *function, unsigned int number, nvmlDevice_t *device)
{
    nvmlReturn_t result = sim_fault(function, (int)number);
    if (result != NVML_SUCCESS)
        return result;
    result = sim_gpu_answer(number);
    if (result != NVML_SUCCESS)
        return result;
    result = sim_open_gpu(number);
    if (result != NVML_SUCCESS)
        return result;
    *device = sim_gpu_handle(number);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    nvmlReturn_t result = sim_check_initialized();
    if (result != NVML_SUCCESS)
        return result;
    int number = sim_visible_gpu(index);
    REQUIRE(device && number >= 0);
    return give_handle(__func__, (unsigned int)number, device);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    nvmlReturn_t result = sim_check_initialized();
    if (result != NVML_SUCCESS)
        return result;
    REQUIRE(uuid && device);
    for (unsigned int i = 0; i < sim_visible_count(); i++) {
        unsigned int number = (unsigned int)sim_visible_gpu(i);
        if (strcmp(sim_gpu_at(number)->uuid, uuid) == 0)
            return give_handle(__func__, number, device);
        nvmlDevice_t mig;
        if (sim_find_mig_device(number, uuid, &mig)) {
            result = give_handle(__func__, number, device);
            if (result == NVML_SUCCESS)
                *device = mig;
            return result;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
    REQUIRE(uuid);
    if (uuid->version != nvmlUUID_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (uuid->type != NVML_UUID_TYPE_ASCII)
        return NVML_ERROR_NOT_SUPPORTED;
    char text[sizeof uuid->value.str + 1];
    snprintf(text, sizeof text, "%.*s", (int)sizeof uuid->value.str, uuid->value.str);
    return nvmlDeviceGetHandleByUUID(text, device);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *pci_bus_id, nvmlDevice_t *device)
{
    nvmlReturn_t result = sim_check_initialized();
    if (result != NVML_SUCCESS)
        return result;
    REQUIRE(pci_bus_id && device);
    unsigned int domain = 0, bus, slot, function;
    if (sscanf(pci_bus_id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4) {
        domain = 0;
        REQUIRE(sscanf(pci_bus_id, "%x:%x.%x", &bus, &slot, &function) == 3);
    }
    for (unsigned int i = 0; i < sim_visible_count(); i++) {
        unsigned int number = (unsigned int)sim_visible_gpu(i);
        const struct nvmlsim_gpu *gpu = sim_gpu_at(number);
        if (gpu->pci_domain == domain && gpu->pci_bus == bus && gpu->pci_device == slot && function == 0)
            return give_handle(__func__, number, device);
    }
    return NVML_ERROR_NOT_FOUND;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *pci_bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id, device);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    ENTER_DEVICE(device);
    REQUIRE(index);
    *index = at.kind == SIM_HANDLE_MIG ? sim_mig_index(&at) : (unsigned int)sim_index_of(at.number);
    return NVML_SUCCESS;
}
