// Package migrate lists what of another driver for NVIDIA GPUs would change with this driver:
// claims and classes with a configuration that it refuses, claims with devices of NVIDIA's DRA
// driver, claims for its consumableShares, and extended resources of the device plugin. It reads a
// [fleet.Snapshot] only, and judges configurations with the plugin's own code.
package migrate

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Change is one row of the table.
type Change struct {
	// Object is "kind namespace/name". If several objects need the same change, it is the first one,
	// and Objects counts them.
	Object  string `json:"object"`
	Objects int    `json:"objects"`
	// Now is the present value, Then its meaning with this driver, and Do the necessary change.
	Now  string `json:"now"`
	Then string `json:"then"`
	Do   string `json:"do"`
}

// Report is the whole table.
type Report struct {
	Changes []Change `json:"changes"`
}

// Check returns what would change.
func Check(s *fleet.Snapshot) Report {
	r := Report{Changes: []Change{}}
	for _, t := range s.Templates {
		r.spec("template "+fleet.Key(t), &t.Spec.Spec.Devices)
	}
	for _, c := range s.Claims {
		// A claim that was made from a template changes with its template.
		if _, made := c.Annotations["resource.kubernetes.io/pod-claim-name"]; !made {
			r.spec("claim "+fleet.Key(c), &c.Spec.Devices)
		}
		r.allocation(c)
	}
	for _, c := range s.Classes {
		for _, config := range c.Spec.Config {
			r.config("class "+c.Name, config.Opaque)
		}
	}
	for _, p := range s.Pods {
		if !fleet.Ended(p) {
			r.pod(s, p)
		}
	}
	return r
}

// add adds a row, or counts one more object for an equal row.
func (r *Report) add(object, now, then, do string) {
	kind, _, _ := strings.Cut(object, " ")
	i := slices.IndexFunc(r.Changes, func(c Change) bool {
		return strings.HasPrefix(c.Object, kind+" ") && c.Now == now && c.Then == then
	})
	if i >= 0 {
		r.Changes[i].Objects++
		return
	}
	r.Changes = append(r.Changes, Change{object, 1, now, then, do})
}

func (r *Report) spec(object string, spec *resourceapi.DeviceClaim) {
	for _, c := range spec.Config {
		r.config(object, c.Opaque)
	}
	for _, q := range spec.Requests {
		if e := q.Exactly; e != nil && e.DeviceClassName == "gpu.nvidia.com" && e.Capacity != nil && len(e.Capacity.Requests) > 0 {
			r.add(object, "capacity of class gpu.nvidia.com (consumableShares)", "each claim takes a whole GPU",
				"deviceClassName: shared.gpu.nvidia.com, and shares in the values: docs/sharing.md")
		}
	}
}

// config adds a row if the plugin would refuse the configuration.
func (r *Report) config(object string, o *resourceapi.OpaqueDeviceConfiguration) {
	if o == nil || o.Driver != device.DriverName {
		return
	}
	config, err := v1beta1.Decode(o.Parameters.Raw)
	if err == nil {
		config.Default()
		err = config.Validate()
	}
	if err != nil {
		r.add(object, "a configuration for "+device.DriverName, "the node refuses it", err.Error())
	}
}

// allocation adds a row if the claim has a device with a name of NVIDIA's DRA driver.
func (r *Report) allocation(c *resourceapi.ResourceClaim) {
	if c.Status.Allocation == nil {
		return
	}
	for _, result := range c.Status.Allocation.Devices.Results {
		if _, known := device.ParseName(result.Device); result.Driver == device.DriverName && !known {
			r.add("claim "+fleet.Key(c), "a device of NVIDIA's DRA driver", "its running Pods go on, new ones do not start",
				"delete the Pods when they may stop: docs/migration.md")
			return
		}
	}
}

// pod adds a row for each extended resource of the device plugin that no class offers.
func (r *Report) pod(s *fleet.Snapshot, p *corev1.Pod) {
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		for resource := range c.Resources.Requests {
			name := string(resource)
			if !strings.HasPrefix(name, "nvidia.com/") || slices.ContainsFunc(s.Classes, func(c *resourceapi.DeviceClass) bool {
				return ptr.Deref(c.Spec.ExtendedResourceName, "") == name
			}) {
				continue
			}
			do := "use a claim"
			profile, isMIG := strings.CutPrefix(name, "nvidia.com/mig-")
			switch {
			case name == "nvidia.com/gpu":
				do = "set deviceClasses.gpu.extendedResourceName=nvidia.com/gpu"
			case name == "nvidia.com/gpu.shared":
				do = "set deviceClasses.shared.extendedResourceName=nvidia.com/gpu.shared, and shares"
			case isMIG:
				do = fmt.Sprintf("add profile %s to deviceClasses.migProfiles with extendedResourceName: %s", profile, name)
			}
			r.add("Pod "+fleet.Key(p), "extended resource "+name, "no class offers it, so such Pods wait", do)
		}
	}
}

// Text writes the table.
func (r Report) Text(w io.Writer, _ bool) {
	if len(r.Changes) == 0 {
		fmt.Fprintln(w, "Nothing would change.")
		return
	}
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	defer func() { _ = t.Flush() }()
	fmt.Fprintln(t, "OBJECT\tNOW\tWITH THIS DRIVER\tCHANGE")
	for _, c := range r.Changes {
		object := c.Object
		if c.Objects > 1 {
			object = fmt.Sprintf("%s and %d more", object, c.Objects-1)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", object, c.Now, c.Then, c.Do)
	}
}
