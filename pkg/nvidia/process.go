package nvidia

import (
	"fmt"
)

// ChildMark is in the environment of each child process of the plugin. Only child processes open
// GPUs. A process's name proves nothing: the plugin of NVIDIA's DRA driver has the same one.
const ChildMark = "GPU_DRA_DRIVER_CHILD=1"

// Process is a process that has a GPU open, as /proc shows.
type Process struct {
	PID  uint32 `json:"pid"`
	Name string `json:"name,omitempty"`
	// Pod is the UID of the process's Pod. It is empty if the process belongs to no Pod.
	Pod string `json:"pod,omitempty"`
	// Plugin is true for a child process of this plugin or of another instance of it.
	Plugin bool `json:"plugin,omitempty"`
}

func (p Process) String() string {
	text := fmt.Sprintf("process %d", p.PID)
	if p.Pod != "" {
		text += ", Pod " + p.Pod
	}
	if p.Plugin {
		text += ", of this driver"
	}
	if p.Name == "" {
		return text
	}
	return p.Name + " (" + text + ")"
}
