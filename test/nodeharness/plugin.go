package nodeharness

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
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/driver"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/lock"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/metadata"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/cut"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/scan"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/prepare/steps"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/preparetest"
)

// Pool is the name of the node's resource pool, which is the node's name.
const Pool = nodeName

// Plugin is the part of the plugin that prepares and unprepares claims. It knows the GPUs as they
// were when [Plugin.Look] was last called.
type Plugin struct {
	preparetest.Transaction

	Worker   *cut.Partitions
	Specs    *cdi.Store
	node     Node
	snapshot inventory.Snapshot
}

// Snapshot returns the inventory that the last [Plugin.Look] read.
func (p *Plugin) Snapshot() inventory.Snapshot { return p.snapshot }

// Reread reads a claim from the API server. Prepare calls it after it has waited for a lock,
// because the claim may have changed.
type Reread func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)

// Plugin returns Prepare and Unprepare as in a plugin process that has just started: it has scanned
// the node's GPUs, but has not compared checkpoint records with them. It does not require the CDI
// hook, which is not installed here. disk stores the records.
func (n Node) Plugin(ctx context.Context, disk durable.FS, reread Reread) (*Plugin, error) {
	cfg := n.Config()
	records, err := checkpoint.Open(cfg.StateDir(), disk)
	if err != nil {
		return nil, err
	}
	locks, err := lock.NewSet(filepath.Join(cfg.StateDir(), "claims.lock"))
	if err != nil {
		return nil, err
	}
	// The simulated node's /proc has no boot ID, so the test host's is used.
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	p := &Plugin{node: n, Specs: cdi.NewStore(cfg.CDIRoot), Worker: n.PartitionWorker()}
	p.Transaction = preparetest.New(prepare.Options{
		Pool: Pool, Locks: locks, Claims: &preparetest.Claims{OnRead: reread},
		Node: steps.Node{
			BootID: strings.TrimSpace(string(bootID)), Now: time.Now, Records: records, Hardware: p, Partitions: p.Worker,
			Specs: metadata.WithSpecs{Store: p.Specs, Files: metadata.NewFiles(cfg.MetadataDir())},
		},
		Edits: &preparetest.Edits{
			OnMIG: func(parent specs.ContainerEdits, in device.Instance, c device.ComputeInstance) specs.ContainerEdits {
				return scan.CapabilityEdits(n.Paths(), parent, in, c)
			},
			OnBinding: func(a device.PCIAddress) string { return scan.Binding(n.Paths().Sysfs, a) },
			OnVerify: func(edits specs.ContainerEdits) error {
				edits.Hooks = nil
				return cdi.Mapper(n.Paths().Mapper()).Verify(edits)
			},
		},
	})
	return p, p.Look(ctx)
}

// Look scans the node and replaces the inventory with the result. It returns an error if the scan
// fails or a GPU cannot be read.
func (p *Plugin) Look(ctx context.Context) error {
	node, err := p.node.Scan(ctx)
	if err == nil && len(node.Problems) > 0 {
		err = fmt.Errorf("scan the node: %v", node.Problems)
	}
	p.snapshot = inventory.Snapshot{Ready: true, Known: true, Node: node}
	return err
}

// Claim returns a claim to which these devices are allocated, and which a Pod has reserved.
func Claim(name string, devices ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{
				{Resource: "pods", Name: "pod-" + name, UID: types.UID("pod-" + name)},
			},
		},
	}
	for i, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: fmt.Sprintf("r%d", i), Driver: driver.DriverName, Pool: Pool, Device: d,
		})
	}
	return c
}
