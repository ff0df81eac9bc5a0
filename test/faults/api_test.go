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
	"github.com/gpu-dra-driver/gpu-dra-driver/test/host"
)

// patience is how long everything may take to agree after a restart: the inventory looks every five seconds.
const patience = 40 * time.Second

// eventually waits until nothing is wrong any more.
func eventually(ctx context.Context, wrong func(context.Context) error) error {
	late := time.After(patience)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := wrong(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-late:
			return fmt.Errorf("still after %s: %w", patience, err)
		case <-tick.C:
		}
	}
}

// outside looks at all that the plugin does, past the plugin that does it.
type outside struct {
	*plugin
	host   host.Host
	api    host.API
	theirs []device.Instance
}

// agree compares hardware, records and specs, and what the claims say that they were given.
//
// This observer must keep no handles of instances: they would block the plugin under test.
func (o outside) agree(ctx context.Context) error {
	return errors.Join(o.plugin.agree(ctx, o.theirs), o.claimsAgree(ctx), o.Cuts.Dismiss(ctx))
}

// agreeAll compares what is offered, too.
func (o outside) agreeAll(ctx context.Context) error {
	return errors.Join(o.agree(ctx), o.slicesAgree(ctx), o.Cuts.Dismiss(ctx))
}

// slicesAgree: a GPU with an admin's instance is offered as it is cut, and besides at most as claims
// are allocated it. Any other is offered in all its shapes.
func (o outside) slicesAgree(ctx context.Context) error {
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
		there, foreign, err := o.Foreign(ctx, o.card(gpu), gpu)
		if err != nil {
			return err
		}
		got := offered[gpu]
		if len(foreign) == 0 {
			// The profiles of an H100 have 25 places.
			if len(got) != 26 || !slices.Contains(got, gpu) {
				errs = append(errs, fmt.Errorf("%s is offered as %v", gpu, got))
			}
			continue
		}
		var cut []string
		for _, in := range there {
			cut = append(cut, fmt.Sprintf("%s-mig-%d-%d", gpu, in.ProfileID, in.Placement.Start))
		}
		missing := slices.ContainsFunc(cut, func(name string) bool { return !slices.Contains(got, name) })
		// An allocated place stays only if it was published before the admin's instance was seen.
		free := slices.ContainsFunc(got, func(name string) bool {
			return !slices.Contains(cut, name) && !slices.Contains(allocated, name)
		})
		if missing || free {
			errs = append(errs, fmt.Errorf("%s is offered as %v and is cut into %v; allocated are %v", gpu, got, cut, allocated))
		}
	}
	return errors.Join(errs...)
}

// claimsAgree: a claim that is prepared says which devices it has, and any other says nothing.
func (o outside) claimsAgree(ctx context.Context) error {
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
			if want, err = o.has(ctx, r); err != nil {
				return err
			}
		}
		said := map[string]string{}
		for _, e := range c.Status.Devices {
			if said[e.Device], err = ready(e); err != nil {
				errs = append(errs, fmt.Errorf("claim %s: device %s: %w", c.Name, e.Device, err))
			}
		}
		if fmt.Sprint(said) != fmt.Sprint(want) {
			errs = append(errs, fmt.Errorf("claim %s says that it has %v, and has %v", c.Name, said, want))
		}
	}
	return errors.Join(errs...)
}

// has says, by device, which UUID is really there for a claim.
func (o outside) has(ctx context.Context, r checkpoint.Record) (map[string]string, error) {
	uuids := map[string]string{}
	for _, d := range r.Devices {
		if d.Device == d.GPU {
			uuids[d.Device] = o.card(d.GPU).UUID
			continue
		}
		there, _, err := o.Foreign(ctx, o.card(d.GPU), d.GPU)
		if err != nil {
			return nil, err
		}
		for _, in := range there {
			if d.Device == fmt.Sprintf("%s-mig-%d-%d", d.GPU, in.ProfileID, in.Placement.Start) && len(in.Compute) == 1 {
				uuids[d.Device] = in.Compute[0].UUID
				if err := o.specHas(r, in.Minor, in.Compute[0].Minor); err != nil {
					return nil, fmt.Errorf("device %s: %w", d.Device, err)
				}
			}
		}
		if uuids[d.Device] == "" {
			return nil, fmt.Errorf("claim %s: device %s is not there", r.Name, d.Device)
		}
	}
	return uuids, nil
}

// specHas makes sure that the claim's containers get these capabilities, which are what opens a partition.
func (o outside) specHas(r checkpoint.Record, minors ...int) error {
	spec, err := os.ReadFile(filepath.Join(o.host.Config().CDIRoot, fmt.Sprintf("k8s.gpu.nvidia.com-claim_%s.json", r.ClaimUID)))
	if err != nil {
		return err
	}
	for _, minor := range minors {
		if node := fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor); !strings.Contains(string(spec), `"`+node+`"`) {
			return fmt.Errorf("the spec of claim %s does not have %s: %s", r.Name, node, spec)
		}
	}
	return nil
}

// ready is the UUID that an entry says.
func ready(e resourceapi.AllocatedDeviceStatus) (uuid string, err error) {
	var data struct {
		UUID string `json:"uuid"`
	}
	if e.Data == nil {
		return "", errors.New("it says nothing of the device")
	}
	if err := json.Unmarshal(e.Data.Raw, &data); err != nil {
		return "", err
	}
	for _, c := range e.Conditions {
		if c.Type == "Ready" && c.Status == metav1.ConditionTrue {
			return data.UUID, nil
		}
	}
	return data.UUID, fmt.Errorf("it is not said to be ready: %+v", e.Conditions)
}
