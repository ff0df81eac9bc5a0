package mps

import (
	"fmt"
	"strconv"

	"tags.cncf.io/container-device-interface/specs-go"
)

const (
	// ContainerPipes is where a client's container mounts the daemon's pipes. Because it is CUDA's
	// default directory, a process without the container's environment (after su or in a login shell)
	// becomes a client too.
	ContainerPipes = "/tmp/nvidia-mps"
	// containerShm is where CUDA exchanges data with its daemon. The CDI mount replaces whatever the
	// Pod has mounted there, so that a client always shares memory with its daemon. NVIDIA's DRA
	// driver does the same (cmd/gpu-kubelet-plugin/sharing.go in
	// kubernetes-sigs/dra-driver-nvidia-gpu).
	containerShm = "/dev/shm"
	// LimitCommand is the subcommand of gpu-mps that limits the memory of a whole container on a GPU.
	LimitCommand = "memory-limit"
	// HookProgram is the file name of gpu-mps, in the image and on the host.
	HookProgram = "gpu-mps"

	// createRuntime is the type of OCI hook that runs in the host's mount namespace, after the
	// container's control group exists and before any of the container's processes runs.
	createRuntime = "createRuntime"

	pipeVariable    = "CUDA_MPS_PIPE_DIRECTORY"
	memoryVariable  = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
	threadsVariable = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)

// Edits returns the CDI edits that make a container's processes clients of the daemon with this ID.
// They mount the daemon's pipes and shared memory, and name the pipes in the environment. The
// directories exist only after [Client.Start].
func Edits(paths Paths, id string) specs.ContainerEdits {
	return specs.ContainerEdits{
		Env:    []string{pipeVariable + "=" + ContainerPipes},
		Mounts: []*specs.Mount{shared(paths.Pipes(id), ContainerPipes), shared(paths.Shm(id), containerShm)},
	}
}

// shared returns a bind mount of the host's directory at the path container. It has the options
// that runtimes give to a container's own /dev/shm.
func shared(host, container string) *specs.Mount {
	return &specs.Mount{HostPath: host, ContainerPath: container, Options: []string{"rw", "nosuid", "nodev", "noexec", "bind"}}
}

// Roots are the paths on the host that a container's memory limit needs. Driver is the root of the
// driver's files. Cgroups is the mount point of cgroup v2.
type Roots struct{ Driver, Cgroups string }

// LimitEdits returns CDI edits with an OCI hook. The hook limits the memory that all processes of a
// container together can use of the GPU /dev/nvidia<minor>, to memory MiB. hookPath is the path of
// gpu-mps on the host.
func LimitEdits(roots Roots, hookPath, gpuUUID string, minor int, memory uint64) specs.ContainerEdits {
	return specs.ContainerEdits{Hooks: []*specs.Hook{{
		HookName: createRuntime,
		Path:     hookPath,
		Args: []string{
			HookProgram, LimitCommand, "--gpu=" + gpuUUID, "--minor=" + strconv.Itoa(minor),
			"--mebibytes=" + strconv.FormatUint(memory, 10),
			"--driver-root=" + roots.Driver, "--cgroup-root=" + roots.Cgroups,
		},
	}}}
}

// Limits returns environment variables for a client's container. They limit each of its processes
// further than the daemon's own limits do: to memory MiB and to threadPercentage of the threads of
// the daemon's only device. Zero means no limit.
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
