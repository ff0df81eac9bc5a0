package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/checkpoint"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nodeharness"
)

// settleTimeout limits the time from a restart of the plugin until the hardware, checkpoint
// records, CDI specs and slices agree. The plugin scans the hardware every 5 s.
const settleTimeout = 40 * time.Second

// eventually calls the function wrong until it returns nil. After settleTimeout it gives up and
// returns the last error.
func eventually(ctx context.Context, wrong func(context.Context) error) error {
	late := time.After(settleTimeout)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := wrong(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-late:
			return fmt.Errorf("still after %s: %w", settleTimeout, err)
		case <-tick.C:
		}
	}
}

// observer compares what the plugin under test has left on the node and in the API. It uses an
// instance of the plugin's code of its own, so it does not depend on the memory of the plugin under
// test.
type observer struct {
	*plugin
	node           nodeharness.Node
	api            nodeharness.API
	adminInstances []device.Instance
}

// check returns an error unless hardware, checkpoint records, CDI specs and the claims' statuses
// agree. Then it stops the observer's worker processes, because MIG instances that they keep open
// would block the plugin under test.
func (o observer) check(ctx context.Context) error {
	return errors.Join(o.plugin.check(ctx, o.adminInstances), o.checkStatuses(ctx), o.Worker.StopWorkers(ctx))
}

// checkAll returns the errors of check, and an error if the published slices do not agree with the
// hardware.
func (o observer) checkAll(ctx context.Context) error {
	return errors.Join(o.check(ctx), o.checkSlices(ctx), o.Worker.StopWorkers(ctx))
}

// checkSlices returns an error if the slices offer wrong devices. A GPU with an admin's MIG
// instance must be offered as its existing MIG instances; an allocated device may be published too.
// Any other GPU must be offered whole and in every placement.
func (o observer) checkSlices(ctx context.Context) error {
	list, err := o.api.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	offered := map[string][]string{}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			gpu, _, _ := strings.Cut(d.Name, "-mig-")
			offered[gpu] = append(offered[gpu], d.Name)
		}
	}
	claims, err := o.api.ResourceV1().ResourceClaims("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var allocated []string
	for _, c := range claims.Items {
		if c.Status.Allocation != nil {
			for _, r := range c.Status.Allocation.Devices.Results {
				allocated = append(allocated, r.Device)
			}
		}
	}
	var errs []error
	for _, gpu := range []string{gpu0, gpu1} {
		there, foreign, err := o.ForeignInstances(ctx, o.card(gpu), gpu)
		if err != nil {
			return err
		}
		got := offered[gpu]
		if len(foreign) == 0 {
			// An H100 is offered whole and in 25 placements.
			if len(got) != 26 || !slices.Contains(got, gpu) {
				errs = append(errs, fmt.Errorf("%s is offered as %v", gpu, got))
			}
			continue
		}
		var existing []string
		for _, in := range there {
			existing = append(existing, fmt.Sprintf("%s-mig-%d-%d", gpu, in.ProfileID, in.Placement.Start))
		}
		missing := slices.ContainsFunc(existing, func(name string) bool { return !slices.Contains(got, name) })
		// A device that does not exist may only be published if it is allocated. It then is from before
		// the plugin saw the admin's MIG instance.
		free := slices.ContainsFunc(got, func(name string) bool {
			return !slices.Contains(existing, name) && !slices.Contains(allocated, name)
		})
		if missing || free {
			errs = append(errs, fmt.Errorf("%s is offered as %v, has MIG instances %v, and %v are allocated", gpu, got, existing, allocated))
		}
	}
	return errors.Join(errs...)
}

// checkStatuses checks that the status of each prepared claim reports the UUIDs of its devices on
// the hardware, and that no other claim reports any.
func (o observer) checkStatuses(ctx context.Context) error {
	list, err := o.api.ResourceV1().ResourceClaims("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range list.Items {
		r, found, err := o.Records.Load(c.UID)
		if err != nil {
			return err
		}
		want := map[string]string{}
		if found && r.State == checkpoint.Prepared {
			if want, err = o.actualUUIDs(ctx, r); err != nil {
				return err
			}
		}
		reported := map[string]string{}
		for _, e := range c.Status.Devices {
			if reported[e.Device], err = readyUUID(e); err != nil {
				errs = append(errs, fmt.Errorf("claim %s: device %s: %w", c.Name, e.Device, err))
			}
		}
		if fmt.Sprint(reported) != fmt.Sprint(want) {
			errs = append(errs, fmt.Errorf("claim %s reports %v and has %v", c.Name, reported, want))
		}
	}
	return errors.Join(errs...)
}

// actualUUIDs returns the UUIDs of a claim's devices on the hardware, by device name. It returns an
// error if a device does not exist or the claim's CDI spec lacks one of the device nodes.
func (o observer) actualUUIDs(ctx context.Context, r checkpoint.Record) (map[string]string, error) {
	uuids := map[string]string{}
	for _, d := range r.Devices {
		if d.Device == d.GPU {
			uuids[d.Device] = o.card(d.GPU).UUID
			continue
		}
		there, _, err := o.ForeignInstances(ctx, o.card(d.GPU), d.GPU)
		if err != nil {
			return nil, err
		}
		for _, in := range there {
			if d.Device == fmt.Sprintf("%s-mig-%d-%d", d.GPU, in.ProfileID, in.Placement.Start) && len(in.Compute) == 1 {
				uuids[d.Device] = in.Compute[0].UUID
				if err := o.checkSpec(r, in.Minor, in.Compute[0].Minor); err != nil {
					return nil, fmt.Errorf("device %s: %w", d.Device, err)
				}
			}
		}
		if uuids[d.Device] == "" {
			return nil, fmt.Errorf("claim %s: device %s does not exist", r.Name, d.Device)
		}
	}
	return uuids, nil
}

// checkSpec returns an error unless the claim's CDI spec has the capability device nodes with these
// minor numbers. They give access to the claim's partitions.
func (o observer) checkSpec(r checkpoint.Record, minors ...int) error {
	name := fmt.Sprintf("k8s.gpu.nvidia.com-claim_%s.json", r.ClaimUID)
	spec, err := os.ReadFile(filepath.Join(o.node.Config().CDIRoot, name))
	if err != nil {
		return err
	}
	for _, minor := range minors {
		if node := fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor); !strings.Contains(string(spec), `"`+node+`"`) {
			return fmt.Errorf("the spec of claim %s lacks %s: %s", r.Name, node, spec)
		}
	}
	return nil
}

// readyUUID returns the UUID in a status entry of a device. It returns an error, too, unless the
// entry reports the device as ready.
func readyUUID(e resourceapi.AllocatedDeviceStatus) (uuid string, err error) {
	var data struct {
		UUID string `json:"uuid"`
	}
	if e.Data == nil {
		return "", errors.New("the status has no data of the device")
	}
	if err := json.Unmarshal(e.Data.Raw, &data); err != nil {
		return "", err
	}
	for _, c := range e.Conditions {
		if c.Type == "Ready" && c.Status == metav1.ConditionTrue {
			return data.UUID, nil
		}
	}
	return data.UUID, fmt.Errorf("the status has no Ready condition: %+v", e.Conditions)
}
