package main

import (
	"fmt"
	"io"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

type shownMIG struct {
	Enabled   bool            `json:"enabled"`
	Pending   bool            `json:"pending"`
	Instances []shownInstance `json:"instances,omitempty"`
}

type shownInstance struct {
	ID        uint32         `json:"id"`
	Profile   string         `json:"profile"`
	ProfileID uint32         `json:"profileID"`
	Placement string         `json:"placement"`
	Minor     uint32         `json:"minor"`
	Compute   []shownCompute `json:"compute,omitempty"`
}

type shownCompute struct {
	ID        uint32 `json:"id"`
	ProfileID uint32 `json:"profileID"`
	Placement string `json:"placement"`
	Minor     uint32 `json:"minor"`
	UUID      string `json:"uuid"`
}

type shownProcess struct {
	PID uint32 `json:"pid"`
	// Instance names the compute instance that the process uses as GI/CI. It is empty if the process
	// uses the whole GPU.
	Instance string `json:"instance,omitempty"`
}

func describeMIG(m *state.Model, g *state.GPU) *shownMIG {
	if m.MIGSupported == 0 {
		return nil
	}
	place := func(i state.Instance) string { return fmt.Sprintf("%d:%d", i.Start, i.Size) }
	shown := &shownMIG{Enabled: g.MIGCurrent != 0, Pending: g.MIGPending != 0}
	for _, gi := range g.GPUInstances() {
		instance := shownInstance{ID: gi.ID, ProfileID: gi.Profile, Placement: place(gi), Minor: g.GPUInstanceMinor(gi.ID)}
		if profile, known := m.Profile(gi.Profile); known {
			instance.Profile = state.Text(profile.Name[:])
		}
		for _, ci := range g.OfInstance(gi.ID) {
			instance.Compute = append(instance.Compute, shownCompute{
				ID: ci.ID, ProfileID: ci.Profile, Placement: place(ci), Minor: g.ComputeInstanceMinor(gi.ID, ci.ID), UUID: g.MIGUUID(gi.ID, ci.ID),
			})
		}
		shown.Instances = append(shown.Instances, instance)
	}
	return shown
}

func describeProcesses(g *state.GPU) []shownProcess {
	var all []shownProcess
	for _, p := range g.Busy() {
		shown := shownProcess{PID: p.PID}
		if p.InInstance {
			shown.Instance = fmt.Sprintf("%d/%d", p.Instance, p.Compute)
		}
		all = append(all, shown)
	}
	return all
}

// mode describes the GPU's current and pending MIG mode in words.
func (m *shownMIG) mode() string {
	word := map[bool]string{true: "on", false: "off"}
	switch {
	case m == nil:
		return "-"
	case m.Enabled != m.Pending:
		return word[m.Enabled] + ", pending " + word[m.Pending]
	}
	return word[m.Enabled]
}

// instances prints each GPU's MIG instances and the processes that NVML lists.
func (s shownNode) instances(to io.Writer) {
	header := func(text string) func() {
		printed := false
		return func() {
			if !printed {
				fmt.Fprintln(to, "\n"+text)
			}
			printed = true
		}
	}
	instance, process := header("GPU\tGI\tPROFILE\tID\tPLACEMENT\tCI\tCI PROFILE\tCI PLACEMENT\tUUID"), header("GPU\tPID\tINSTANCE")
	for _, g := range s.GPUs {
		if g.MIG == nil {
			continue
		}
		for _, gi := range g.MIG.Instances {
			instance()
			if len(gi.Compute) == 0 {
				fmt.Fprintf(to, "%d\t%d\t%s\t%d\t%s\t-\t-\t-\t-\n", g.Index, gi.ID, gi.Profile, gi.ProfileID, gi.Placement)
			}
			for _, ci := range gi.Compute {
				fmt.Fprintf(to, "%d\t%d\t%s\t%d\t%s\t%d\t%d\t%s\t%s\n",
					g.Index, gi.ID, gi.Profile, gi.ProfileID, gi.Placement, ci.ID, ci.ProfileID, ci.Placement, ci.UUID)
			}
		}
	}
	for _, g := range s.GPUs {
		for _, p := range g.Processes {
			process()
			fmt.Fprintf(to, "%d\t%d\t%s\n", g.Index, p.PID, p.Instance)
		}
	}
}
