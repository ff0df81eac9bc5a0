package main

import (
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// shownNode is the node's state as the show command prints it in YAML.
type shownNode struct {
	Node          string `json:"node"`
	Seed          string `json:"seed,omitempty"`
	DriverLoaded  bool   `json:"driverLoaded"`
	DriverVersion string `json:"driverVersion"`
	DriverEpoch   uint32 `json:"driverEpoch"`
	InUse         bool   `json:"inUse"`
	// References is the kernel module's reference count: the processes with NVML initialised plus the
	// GPUs that each of them has open. At 0 the module can be unloaded.
	References int    `json:"references"`
	Events     uint64 `json:"events"`
	// Lock names how the driver serialises calls that change MIG mode or MIG instances.
	Lock   string       `json:"lock"`
	GPUs   []shownGPU   `json:"gpus"`
	Faults []shownFault `json:"faults,omitempty"`
}

type shownGPU struct {
	Index     int    `json:"index"`
	Minor     uint32 `json:"minor"`
	PCI       string `json:"pci"`
	UUID      string `json:"uuid"`
	Name      string `json:"name"`
	NUMANode  int32  `json:"numaNode"`
	Condition string `json:"condition"`
	Recovery  string `json:"recovery"`
	ECCSingle uint64 `json:"eccSingle"`
	ECCDouble uint64 `json:"eccDouble"`
	// Remap is the state of row remapping: none, pending, failed or both.
	Remap       string   `json:"remap"`
	Fabric      string   `json:"fabric"`
	Events      []string `json:"events,omitempty"`
	ComputeMode uint32   `json:"computeMode"`
	TimeSlice   uint32   `json:"timeSlice"`
	Persistence bool     `json:"persistence"`
	// MIG is nil on a GPU that does not support MIG.
	MIG       *shownMIG      `json:"mig,omitempty"`
	Processes []shownProcess `json:"processes,omitempty"`
}

type shownFault struct {
	Function string `json:"function"`
	GPU      string `json:"gpu"`
	Effect   string `json:"effect"`
	Left     string `json:"left"`
	Hits     uint64 `json:"hits"`
}

func newShow(n *node) *cobra.Command {
	var output string
	command := &cobra.Command{
		Use:   "show",
		Short: "Show the node's state",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return n.with(func(f *state.File) error {
				if err := f.Settle(); err != nil {
					return err
				}
				shown := describe(f)
				var err error
				if shown.References, err = f.References(); err != nil {
					return err
				}
				switch output {
				case "":
					return shown.table(os.Stdout)
				case "yaml":
					data, err := yaml.Marshal(shown)
					if err != nil {
						return err
					}
					_, err = os.Stdout.Write(data)
					return err
				}
				return fmt.Errorf("output %q is not yaml", output)
			})
		},
	}
	command.Flags().StringVarP(&output, "output", "o", "", "yaml, instead of a table")
	return command
}

func describe(f *state.File) shownNode {
	h := f.Header()
	shown := shownNode{
		Node: state.Text(h.NodeName[:]), Seed: state.Text(h.Seed[:]), DriverLoaded: h.DriverLoaded != 0,
		DriverVersion: state.Text(h.DriverVersion[:]), DriverEpoch: h.DriverEpoch, InUse: f.InUse(), Events: atomic.LoadUint64(&h.EventSeq),
	}
	for name, kind := range cutLocks {
		if kind == h.CutLock {
			shown.Lock = name
		}
	}
	for i := range f.GPUCount() {
		g := f.GPU(i)
		one := shownGPU{
			Index: i, Minor: g.Minor, PCI: g.Address(), UUID: state.Text(g.UUID[:]), Name: state.Text(f.Model(int(g.Model)).Name[:]),
			NUMANode: g.NUMANode, Condition: condition(g), Recovery: state.RecoveryName(g.RecoveryAction),
			ECCSingle: g.ECCSingleVolatile, ECCDouble: g.ECCDoubleVolatile, Remap: remap(g),
			Fabric: state.FabricName(
				g.FabricState,
			), Events: model.EventTypeNames(g.EventTypes), ComputeMode: g.ComputeMode, TimeSlice: g.TimeSlice, Persistence: g.PersistenceMode != 0,
			MIG: describeMIG(f.Model(int(g.Model)), g), Processes: describeProcesses(g),
		}
		shown.GPUs = append(shown.GPUs, one)
	}
	for i := range int(h.FaultCount) {
		if fault := f.Fault(i); atomic.LoadUint64(&fault.Serial) != 0 {
			shown.Faults = append(shown.Faults, describeFault(fault))
		}
	}
	return shown
}

func condition(g *state.GPU) string {
	switch {
	case g.Present == 0:
		return "gone"
	case g.Lost != 0:
		return "lost"
	case !g.Attached():
		return "unbound" // from NVIDIA's driver
	}
	return "ok"
}

func remap(g *state.GPU) string {
	switch {
	case g.RemapPending != 0 && g.RemapFailure != 0:
		return "both"
	case g.RemapPending != 0:
		return "pending"
	case g.RemapFailure != 0:
		return "failed"
	}
	return "none"
}

func describeFault(fault *state.Fault) shownFault {
	shown := shownFault{Function: state.Text(fault.Function[:]), GPU: "any", Left: "always", Hits: atomic.LoadUint64(&fault.Hits)}
	if fault.GPU != state.AnyGPU {
		shown.GPU = fmt.Sprint(fault.GPU)
	}
	if left := atomic.LoadInt32(&fault.Remaining); left >= 0 {
		shown.Left = fmt.Sprint(left)
	}
	shown.Effect = "fails: " + state.ErrorName(fault.Error)
	if _, _, sysfs := state.SysfsWrite(shown.Function); sysfs {
		shown.Effect = "fails: " + syscall.Errno(fault.Error).Error()
	}
	switch {
	case fault.Kind == state.FaultIgnore:
		shown.Effect = "has no effect"
	case fault.Kind == state.FaultSlow:
		shown.Effect = "slow: " + (time.Duration(fault.DelayMS) * time.Millisecond).String()
	case fault.Kind == state.FaultKill && fault.Group != 0:
		shown.Effect = "kills the group"
	case fault.Kind == state.FaultKill:
		shown.Effect = "kills"
	}
	if fault.After != 0 {
		shown.Effect += ", afterwards"
	}
	return shown
}

func (s shownNode) table(to io.Writer) error {
	driver := "not loaded"
	if s.DriverLoaded {
		driver = s.DriverVersion
	}
	w := tabwriter.NewWriter(to, 0, 4, 2, ' ', 0)
	fmt.Fprintf(
		w,
		"node %s, driver %s (load %d), references: %d, events: %d, MIG lock: %s\n\n",
		s.Node,
		driver,
		s.DriverEpoch,
		s.References,
		s.Events,
		s.Lock,
	)
	fmt.Fprintln(w, "GPU\tMINOR\tPCI\tNUMA\tNAME\tUUID\tCONDITION\tRECOVERY\tECC 1/2\tMIG")
	for _, g := range s.GPUs {
		fmt.Fprintf(w, "%d\t%d\t%s\t%d\t%s\t%s\t%s\t%s\t%d/%d\t%s\n",
			g.Index, g.Minor, g.PCI, g.NUMANode, g.Name, g.UUID, g.Condition, g.Recovery, g.ECCSingle, g.ECCDouble, g.MIG.mode())
	}
	s.instances(w)
	if len(s.Faults) > 0 {
		fmt.Fprintln(w, "\nFUNCTION\tGPU\tEFFECT\tLEFT\tHITS")
		for _, x := range s.Faults {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\n", x.Function, x.GPU, x.Effect, x.Left, x.Hits)
		}
	}
	return w.Flush()
}
