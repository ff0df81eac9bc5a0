package mps

import (
	"fmt"
	"strconv"

	"tags.cncf.io/container-device-interface/specs-go"
)

const (
	// ContainerPipes is where a client's container has the pipes. It is CUDA's own default, so that a process whose environment was cleaned (by su, or
	// by a login shell) is a client all the same.
	ContainerPipes = "/tmp/nvidia-mps"
	// containerShm is where CUDA exchanges data with its daemon. CDI removes what the Pod has
	// mounted there, so that a client always has its daemon's, as with NVIDIA's reference driver
	// (https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/blob/main/cmd/gpu-kubelet-plugin/sharing.go).
	containerShm = "/dev/shm"
	// LimitCommand is the subcommand of gpu-mps that holds a container as a whole to a part of a
	// GPU's memory.
	LimitCommand = "memory-limit"
	// HookProgram is the name of the program, in the image and on the host.
	HookProgram = "gpu-mps"

	// createRuntime hooks run in the host's mount namespace, when the container's control group is
	// there and nothing of the container's runs yet.
	createRuntime = "createRuntime"

	pipeVariable    = "CUDA_MPS_PIPE_DIRECTORY"
	memoryVariable  = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	threadsVariable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)

// Edits is what makes the processes of a container clients of the daemon: its pipes, the variable
// that names them, and its shared memory. The directories must be there when the container is
// created, that is, after [Client.Start].
func Edits(paths Paths, id string) specs.ContainerEdits {
	return specs.ContainerEdits{
		Env:    []string{pipeVariable + "=" + ContainerPipes},
		Mounts: []*specs.Mount{shared(paths.Pipes(id), ContainerPipes), shared(paths.Shm(id), containerShm)},
	}
}

// shared has the options of the runtime's own /dev/shm.
func shared(host, container string) *specs.Mount {
	return &specs.Mount{HostPath: host, ContainerPath: container, Options: []string{"rw", "nosuid", "nodev", "noexec", "bind"}}
}

// Roots are where the host has what a limit of a container takes: the driver's files, and the control groups.
type Roots struct{ Driver, Cgroups string }

// LimitEdits hold a container to that many MiB of a GPU, whatever processes it has. hookPath is
// where the host keeps gpu-mps.
func LimitEdits(roots Roots, hookPath, gpuUUID string, memory uint64) specs.ContainerEdits {
	return specs.ContainerEdits{Hooks: []*specs.Hook{{
		HookName: createRuntime,
		Path:     hookPath,
		Args: []string{
			HookProgram, LimitCommand, "--gpu=" + gpuUUID, "--mebibytes=" + strconv.FormatUint(memory, 10),
			"--driver-root=" + roots.Driver, "--cgroup-root=" + roots.Cgroups,
		},
	}}}
}

// Limits are the variables by which each process of a container is held to less than the daemon's defaults: memory in MiB of the daemon's only device, and
// a percentage of its threads. Zero is no limit.
func Limits(memory uint64, threadPercentage int) []string {
	var env []string
	if memory > 0 {
		env = append(env, fmt.Sprintf("%s=0=%dM", memoryVariable, memory))
	}
	if threadPercentage > 0 {
		env = append(env, threadsVariable+"="+strconv.Itoa(threadPercentage))
	}
	return env
}
