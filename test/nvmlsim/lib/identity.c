/*
 * A GPU's identity: name, UUID, PCI address, architecture, memory and fabric. The values come from
 * the model file and the node file.
 */
#include "sim.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

NVMLSIM_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    ENTER_DEVICE(device);
    char text[NVMLSIM_NAME + 64];
    snprintf(text, sizeof text, "%s", at.model->name);
    if (at.kind == SIM_HANDLE_MIG)
        sim_mig_device_name(&at, text, sizeof text);
    return sim_copy_string(name, length, text);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ENTER_DEVICE(device);
    char text[NVML_DEVICE_UUID_BUFFER_SIZE];
    snprintf(text, sizeof text, "%s", at.gpu->uuid);
    if (at.kind == SIM_HANDLE_MIG)
        sim_mig_uuid(at.gpu, at.gi_id, at.ci_id, text);
    return sim_copy_string(uuid, length, text);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    ENTER_GPU(device);
    if (!gpu->serial[0])
        return NVML_ERROR_NOT_SUPPORTED;
    return sim_copy_string(serial, length, gpu->serial);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    ENTER_GPU(device);
    REQUIRE(minor);
    *minor = gpu->minor;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t device, unsigned int *module)
{
    ENTER_GPU(device);
    REQUIRE(module);
    *module = gpu->module_id;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER_GPU(device);
    REQUIRE(pci);
    memset(pci, 0, sizeof *pci);
    pci->domain = gpu->pci_domain;
    pci->bus = gpu->pci_bus;
    pci->device = gpu->pci_device;
    pci->pciDeviceId = sim_model(gpu)->pci_device_id;
    pci->pciSubSystemId = sim_model(gpu)->pci_subsystem_id;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", gpu->pci_domain, gpu->pci_bus & 0xff, gpu->pci_device & 0x1f);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", gpu->pci_domain & 0xffff, gpu->pci_bus & 0xff,
             gpu->pci_device & 0x1f);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetPciInfo_v3(device, pci);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetPciInfo_v3(device, pci);
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    ENTER_GPU(device);
    REQUIRE(pci);
    if (pci->version != nvmlPciInfoExt_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memset(pci, 0, sizeof *pci);
    pci->version = nvmlPciInfoExt_v1;
    pci->domain = gpu->pci_domain;
    pci->bus = gpu->pci_bus;
    pci->device = gpu->pci_device;
    pci->pciDeviceId = sim_model(gpu)->pci_device_id;
    pci->pciSubSystemId = sim_model(gpu)->pci_subsystem_id;
    pci->baseClass = 3;
    pci->subClass = 2;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", gpu->pci_domain, gpu->pci_bus & 0xff, gpu->pci_device & 0x1f);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned int *node)
{
    ENTER_GPU(device);
    REQUIRE(node);
    /*
     * NVML asks for the NUMA node of the GPU's own memory, which only coherent platforms have. It
     * is not the NUMA node nearest to the GPU.
     */
    (void)gpu;
    return NVML_ERROR_NOT_SUPPORTED;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, nvmlGpuTopologyLevel_t *level)
{
    ENTER_GPU(device);
    int number = sim_handle_gpu(other);
    REQUIRE(level && number >= 0 && sim_gpu_visible((unsigned int)number));
    const struct nvmlsim_gpu *second = sim_gpu_at((unsigned int)number);
    if (gpu == second)
        *level = NVML_TOPOLOGY_INTERNAL;
    else if (gpu->pci_root == second->pci_root && gpu->pci_switch != 0 && gpu->pci_switch == second->pci_switch)
        *level = NVML_TOPOLOGY_SINGLE;
    else if (gpu->pci_root == second->pci_root)
        *level = NVML_TOPOLOGY_HOSTBRIDGE;
    else if (gpu->numa_node >= 0 && gpu->numa_node == second->numa_node)
        *level = NVML_TOPOLOGY_NODE;
    else
        *level = NVML_TOPOLOGY_SYSTEM;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand)
{
    ENTER_GPU(device);
    REQUIRE(brand);
    *brand = (nvmlBrandType_t)sim_model(gpu)->brand;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *architecture)
{
    ENTER_GPU(device);
    REQUIRE(architecture);
    *architecture = sim_model(gpu)->architecture;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    ENTER_GPU(device);
    REQUIRE(major && minor);
    *major = (int)sim_model(gpu)->cc_major;
    *minor = (int)sim_model(gpu)->cc_minor;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned int *cores)
{
    ENTER_GPU(device);
    REQUIRE(cores);
    const struct nvmlsim_model *model = sim_model(gpu);
    if (model->multiprocessors == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    /*
     * FP32 cores of each multiprocessor, by compute capability (CUDA C++ Programming Guide): 64 in
     * 7.x and 8.0, and 128 later.
     */
    unsigned int capability = model->cc_major * 10 + model->cc_minor;
    *cores = model->multiprocessors * (capability <= 80 ? 64 : 128);
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode)
{
    ENTER_GPU(device);
    REQUIRE(mode);
    if (mode->version != nvmlDeviceAddressingMode_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (sim_model(gpu)->addressing_mode == NVMLSIM_ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    mode->value = sim_model(gpu)->addressing_mode;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *mode)
{
    ENTER_GPU(device);
    REQUIRE(mode);
    *mode = (nvmlGpuVirtualizationMode_t)gpu->virtualization;
    return NVML_SUCCESS;
}

/*
 * Returns the size of a device's memory. A MIG device has the memory of its GPU instance. The
 * result is 0 for a GPU that uses the host's memory.
 */
static unsigned long long memory_of(const struct sim_target *at)
{
    if (at->kind == SIM_HANDLE_MIG)
        return (unsigned long long)at->profile->memory_mib << 20;
    return LOAD(at->gpu->no_memory_info) ? 0 : (unsigned long long)at->model->memory_mib << 20;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ENTER_DEVICE(device);
    REQUIRE(memory);
    if (memory_of(&at) == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    memory->total = memory_of(&at);
    memory->used = 0;
    memory->free = memory->total;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    ENTER_DEVICE(device);
    REQUIRE(memory);
    if (memory->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (memory_of(&at) == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    memory->total = memory_of(&at);
    memory->reserved = 0;
    memory->used = 0;
    memory->free = memory->total;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    ENTER_DEVICE(device);
    REQUIRE(memory);
    if (at.model->bar1_mib == NVMLSIM_ABSENT)
        return NVML_ERROR_NOT_SUPPORTED;
    memory->bar1Total = (unsigned long long)at.model->bar1_mib << 20;
    if (at.kind == SIM_HANDLE_MIG) /* a MIG device's share follows its memory slices */
        memory->bar1Total = memory->bar1Total / at.model->memory_slices * at.gi.size;
    memory->bar1Used = 1 << 20;
    memory->bar1Free = memory->bar1Total - memory->bar1Used;
    return NVML_SUCCESS;
}

static nvmlGpuFabricState_t fabric_state(const struct nvmlsim_gpu *gpu)
{
    /* The driver suspends its fabric probe with the first instance (kmigmgr_ga100.c). */
    if (LOAD(sim_state()->fabric_by_instances) && LOAD(gpu->fabric_state) != NVML_GPU_FABRIC_STATE_NOT_SUPPORTED &&
        sim_has_instances(gpu))
        return NVML_GPU_FABRIC_STATE_NOT_STARTED;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    bool interim = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000 < LOAD(gpu->fabric_until_ms);
    return (nvmlGpuFabricState_t)(interim ? LOAD(gpu->fabric_interim) : LOAD(gpu->fabric_state));
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
    ENTER_GPU(device);
    REQUIRE(info);
    if (sim_model(gpu)->architecture < NVML_DEVICE_ARCH_HOPPER) /* nvml.h: for Hopper or newer */
        return NVML_ERROR_NOT_SUPPORTED;
    memset(info, 0, sizeof *info);
    memcpy(info->clusterUuid, gpu->fabric_cluster, sizeof gpu->fabric_cluster);
    info->cliqueId = gpu->fabric_clique;
    info->state = fabric_state(gpu);
    info->status = info->state == NVML_GPU_FABRIC_STATE_COMPLETED ? (nvmlReturn_t)LOAD(gpu->fabric_status) : NVML_SUCCESS;
    return NVML_SUCCESS;
}

NVMLSIM_API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info)
{
    ENTER_GPU(device);
    REQUIRE(info);
    /*
     * Version 3 has one more byte than version 2. In version 2 this byte is padding and must stay
     * unchanged.
     */
    if (info->version != nvmlGpuFabricInfo_v2 && info->version != nvmlGpuFabricInfo_v3)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (sim_model(gpu)->architecture < NVML_DEVICE_ARCH_HOPPER)
        return NVML_ERROR_NOT_SUPPORTED;
    memcpy(info->clusterUuid, gpu->fabric_cluster, sizeof gpu->fabric_cluster);
    info->cliqueId = gpu->fabric_clique;
    info->state = fabric_state(gpu);
    info->status = info->state == NVML_GPU_FABRIC_STATE_COMPLETED ? (nvmlReturn_t)LOAD(gpu->fabric_status) : NVML_SUCCESS;
    info->healthMask = 0;
    if (info->version == nvmlGpuFabricInfo_v3)
        info->healthSummary = NVML_GPU_FABRIC_HEALTH_SUMMARY_NOT_SUPPORTED;
    return NVML_SUCCESS;
}
