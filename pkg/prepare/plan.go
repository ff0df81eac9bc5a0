package prepare

import (
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/cdi"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/inventory"
)

// plan is what a claim's allocation asks for on this node, before anything is done.
type plan struct {
	record checkpoint.Record
	steps  []Step
	// edits of each device of the record, and of the node.
	edits  []specs.ContainerEdits
	common specs.ContainerEdits
}

// plan turns an allocation into steps, or says why it cannot be served. It changes nothing.
func (p *Preparer) plan(c *resourceapi.ResourceClaim) (*plan, error) {
	allocation, err := claim.Read(c, p.DriverName)
	if err != nil {
		return nil, because(CauseClaim, "%w", err)
	}
	w := &plan{record: checkpoint.Record{ClaimUID: c.UID, Namespace: c.Namespace, Name: c.Name, BootID: p.BootID}}
	if len(allocation.Results) == 0 {
		return w, nil
	}
	snapshot := p.Hardware.Snapshot()
	if !snapshot.Ready {
		return nil, notReady(snapshot)
	}
	w.common = snapshot.Node.Common
	spec := &claimSpec{}
	taken := map[string]string{}
	for _, r := range allocation.Results {
		if r.Pool != p.Pool {
			return nil, because(CauseClaim, "request %s was allocated device %s of pool %s, and this node's pool is %s", r.Request, r.Device, r.Pool, p.Pool)
		}
		gpu, edits, ok := find(snapshot, r.Device)
		if !ok {
			return nil, because(CauseDevice, "request %s was allocated device %s, which is not on this node%s", r.Request, r.Device, missing(snapshot, r.Device))
		}
		if err := supported(r); err != nil {
			return nil, because(CauseClaim, "%w", err)
		}
		if other, twice := taken[r.Device]; twice && !r.AdminAccess {
			return nil, because(CauseClaim, "requests %s and %s were both allocated device %s", other, r.Request, r.Device)
		}
		if !r.AdminAccess {
			taken[r.Device] = r.Request
		}
		w.record.Devices = append(w.record.Devices, checkpoint.Device{
			Request: r.Request, Pool: r.Pool, Device: r.Device, ShareID: r.ShareID, AdminAccess: r.AdminAccess,
			GPU: gpu.WholeName(), GPUUUID: gpu.UUID,
		})
		w.edits = append(w.edits, edits)
		spec.add(specDevice{Name: cdi.ClaimDeviceName(c.UID, r.Device, r.ShareID), Edits: edits})
	}
	w.steps = []Step{spec}
	w.record.Steps, err = store(w.steps)
	return w, err
}

// add leaves out a device that is there already: with admin access two requests may get the same one, and a CDI spec names a device once.
func (s *claimSpec) add(d specDevice) {
	for _, there := range s.Devices {
		if there.Name == d.Name {
			return
		}
	}
	s.Devices = append(s.Devices, d)
}

func find(s inventory.Snapshot, name string) (device.GPU, specs.ContainerEdits, bool) {
	for _, g := range s.Node.GPUs {
		if g.WholeName() == name {
			return g.GPU, g.Edits, true
		}
	}
	return device.GPU{}, specs.ContainerEdits{}, false
}

// missing says what is known of a device that is not offered, and else what is offered.
func missing(s inventory.Snapshot, name string) string {
	for _, problem := range s.Node.Problems {
		if problem.PCIAddress != "" && problem.PCIAddress.WholeName() == name {
			return ": " + problem.Message
		}
	}
	names := make([]string, len(s.Node.GPUs))
	for i, g := range s.Node.GPUs {
		names[i] = g.WholeName()
	}
	if len(names) == 0 {
		return ": it offers none now"
	}
	return " (any more): it offers " + strings.Join(names, ", ")
}

// supported refuses configuration that this version would have to ignore.
func supported(r claim.Result) error {
	c, ok := r.Config.(*v1beta1.GpuConfig)
	if r.Config == nil {
		return fmt.Errorf("request %s: no configuration is known for device %s", r.Request, r.Device)
	}
	if !ok {
		return fmt.Errorf("request %s: device %s is a whole GPU, which takes a GpuConfig, not a %s", r.Request, r.Device, r.Config.Kind())
	}
	if c.Sharing != nil {
		return fmt.Errorf("request %s: sharing strategy %q is not supported by this version of the driver: remove sharing from the claim's GpuConfig", r.Request, c.Sharing.Strategy)
	}
	return nil
}
