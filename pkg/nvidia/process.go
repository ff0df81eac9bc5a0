package nvidia

import (
	"fmt"
)

// Process is a process that has a GPU open, as NVML or /proc shows.
type Process struct {
	PID  uint32 `json:"pid"`
	Name string `json:"name,omitempty"`
	// Pod is the UID of the process's Pod. It is empty if the process belongs to no Pod.
	Pod string `json:"pod,omitempty"`
}

func (p Process) String() string {
	text := fmt.Sprintf("process %d", p.PID)
	if p.Pod != "" {
		text += ", Pod " + p.Pod
	}
	if p.Name == "" {
		return text
	}
	return p.Name + " (" + text + ")"
}
