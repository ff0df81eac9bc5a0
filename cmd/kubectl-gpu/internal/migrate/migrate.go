// Package migrate lists what of another driver for NVIDIA GPUs would change with this driver:
//   - the other driver's values
//   - claims and classes with a configuration that this driver refuses
//   - selectors by attributes or capacities, and tolerations of taints, that this driver has not
//   - claims with devices of NVIDIA's DRA driver, and claims for its consumableShares
//   - extended resources of the device plugin
//
// It reads a [fleet.Snapshot] only, and judges configurations with the plugin's own code.
package migrate

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/api/resource/v1beta1"
	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	models "github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/slices"
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
func Check(s *fleet.Snapshot) (Report, error) {
	r := Report{Changes: []Change{}}
	if err := s.Need(fleet.Classes); err != nil {
		return r, err // each extended resource would be a row
	}
	for _, o := range s.OtherDrivers() {
		r.add("DaemonSet "+fleet.Key(o.DaemonSet), "runs "+o.What, "its values have other names", "translate them: "+o.Guide)
	}
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
		r.selectors("class "+c.Name, c.Spec.Selectors)
	}
	for _, rule := range s.TaintRules {
		selector := rule.Spec.DeviceSelector
		if selector == nil || selector.Device == nil || ptr.Deref(selector.Driver, device.DriverName) != device.DriverName {
			continue
		}
		if _, known := device.ParseName(*selector.Device); !known {
			r.add("DeviceTaintRule "+rule.Name, "names device "+*selector.Device, "no device has this name",
				"kubectl gpu status -o wide shows the names")
		}
	}
	for _, p := range s.Pods {
		if !fleet.Ended(p) {
			r.pod(s, p)
		}
	}
	return r, nil
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
		if e := q.Exactly; e != nil {
			r.request(object, e.DeviceClassName, e.Capacity, e.Selectors, e.Tolerations)
		}
		for _, sub := range q.FirstAvailable {
			r.request(object, sub.DeviceClassName, sub.Capacity, sub.Selectors, sub.Tolerations)
		}
	}
}

func (r *Report) request(object, class string, capacity *resourceapi.CapacityRequirements, selectors []resourceapi.DeviceSelector,
	tolerations []resourceapi.DeviceToleration,
) {
	if class == "gpu.nvidia.com" && capacity != nil && len(capacity.Requests) > 0 {
		r.add(object, "capacity of class gpu.nvidia.com (consumableShares)", "each claim takes a whole GPU",
			"deviceClassName: shared.gpu.nvidia.com, and shares in the values: docs/sharing.md")
	}
	r.selectors(object, selectors)
	tolerates := map[string]bool{}
	for _, t := range tolerations {
		name, ours := strings.CutPrefix(t.Key, device.DriverName+"/")
		tolerates[name] = true
		if ours && !slices.Contains(taints, name) {
			r.add(object, "tolerates the taint "+t.Key, "no device has this taint", "docs/health.md lists the taints")
		}
	}
	if tolerates["xid"] && !tolerates["unhealthy"] && !tolerates[""] {
		r.add(object, "tolerates the taint "+device.DriverName+"/xid", "after most XIDs a GPU also has the taint unhealthy",
			"tolerate "+device.DriverName+"/unhealthy too: docs/health.md")
	}
}

// taints are the keys of this driver's taints, which docs/health.md explains.
var taints = []string{"gpu-lost", "unmonitored", "xid", "unhealthy", "degraded", "not-ready", "unvalidated"}

// reads finds what a selector reads of a device. With .?name nothing fails if it is missing.
var reads = regexp.MustCompile(`device\.(attributes|capacity)\[['"]gpu\.nvidia\.com['"]\]\.(\w+)`)

// known has the attributes and capacities of a GPU that is offered in every way.
var known = sync.OnceValue(func() map[string]bool {
	all := map[string]bool{"attributes.partitionType": true}
	m, err := models.Model("h100-sxm5-80gb")
	for _, shares := range []string{"[{kind: fractions}]", "[{kind: shares, count: 2}]"} {
		if err != nil {
			break
		}
		var t models.Template
		t, err = models.OfModel(*m, models.Options{MIGPolicy: "dynamic", Shares: shares})
		for _, slice := range t.Slices {
			for _, d := range slice.Spec.Devices {
				for name := range d.Attributes {
					all["attributes."+string(name)] = true
				}
				for name := range d.Capacity {
					all["capacity."+string(name)] = true
				}
			}
		}
	}
	return all
})

func (r *Report) selectors(object string, all []resourceapi.DeviceSelector) {
	for _, s := range all {
		if s.CEL == nil {
			continue
		}
		for _, found := range reads.FindAllStringSubmatch(s.CEL.Expression, -1) {
			if kind, name := found[1], found[2]; !known()[kind+"."+name] {
				r.add(object, fmt.Sprintf("a selector reads %s %s", strings.TrimSuffix(kind, "s"), name),
					"no device has it, which stops scheduling", "docs/reference.md lists what claims can select by")
			}
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
