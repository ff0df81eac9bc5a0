package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
)

// Pool is what claims are allocated from.
const Pool = nodeName

// Plugin is the transaction in one process. It sees of the node what was there when it last looked.
type Plugin struct {
	*prepare.Preparer

	Cuts     *nvidia.Partitions
	Specs    *cdi.Store
	host     Host
	snapshot inventory.Snapshot
}

// Snapshot is what the plugin last saw.
func (p *Plugin) Snapshot() inventory.Snapshot { return p.snapshot }

// Reread gets a claim after a wait.
type Reread func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)

// Plugin is a new process of the plugin, which has looked at the node and put nothing in order yet. Nobody has installed the hook here, so none is
// looked for.
func (h Host) Plugin(ctx context.Context, disk durable.FS, reread Reread) (*Plugin, error) {
	cfg := h.Config()
	records, err := checkpoint.Open(cfg.StateDir(), disk)
	if err != nil {
		return nil, err
	}
	locks, err := lock.NewSet(filepath.Join(cfg.StateDir(), "locks"))
	if err != nil {
		return nil, err
	}
	// The node's proc has none, and then it is this machine's.
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	p := &Plugin{host: h, Specs: cdi.NewStore(cfg.CDIRoot), Cuts: h.Cutter()}
	p.Preparer = prepare.New(prepare.Options{
		DriverName: driver.DriverName, Pool: Pool, BootID: strings.TrimSpace(string(bootID)), Now: time.Now,
		Hardware: p, Specs: p.Specs, Records: records, Locks: locks, Reread: reread,
		Partitions: p.Cuts, MIGEdits: h.Paths().CapabilityEdits,
		Verify: func(edits specs.ContainerEdits) error {
			edits.Hooks = nil
			return cdi.Verify(edits, h.Paths().Visible)
		},
	})
	return p, p.Look(ctx)
}

// Look brings what the plugin sees of the node up to date. A GPU that is not seen is an error.
func (p *Plugin) Look(ctx context.Context) error {
	node, err := p.host.Scan(ctx)
	if err == nil && len(node.Problems) > 0 {
		err = fmt.Errorf("look at the node: %v", node.Problems)
	}
	p.snapshot = inventory.Snapshot{Ready: true, Known: true, Node: node}
	return err
}

// Claim is one that was allocated these devices.
func Claim(name string, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation:  &resourceapi.AllocationResult{},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-" + name, UID: types.UID("pod-" + name)}},
		},
	}
	for i, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: fmt.Sprintf("r%d", i), Driver: driver.DriverName, Pool: Pool, Device: d,
		})
	}
	return c
}
