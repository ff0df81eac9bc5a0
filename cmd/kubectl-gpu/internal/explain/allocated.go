package explain

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/claim"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// Claim is an allocated claim.
type Claim struct {
	Name    string            `json:"name"`
	Devices []AllocatedDevice `json:"devices"`
	// Problem is an error of the claim's configuration.
	Problem string `json:"problem,omitempty"`
}

// AllocatedDevice is one device of a claim.
type AllocatedDevice struct {
	Request string `json:"request"`
	Node    string `json:"node"`
	Device  string `json:"device"`
	// What is the kind of device: "GPU", "1g.10gb", "share of a GPU".
	What  string `json:"what"`
	Share string `json:"share,omitempty"`
	// Sharers are the other claims with shares of the device.
	Sharers []string `json:"sharers,omitempty"`
	// Taints are those that the device has now.
	Taints      []string           `json:"taints,omitempty"`
	Admin       bool               `json:"adminAccess,omitempty"`
	Published   bool               `json:"published"`
	Conditions  []metav1.Condition `json:"conditions,omitempty"`
	Settings    []Setting          `json:"settings,omitempty"`
	OtherDriver string             `json:"driver,omitempty"`
}

// Setting is one value of the configuration in force, and where it comes from: "claim", "class",
// "default" or "pool".
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	From  string `json:"from"`
}

// claim returns what an allocated claim has.
func (e *Explainer) claim(c *resourceapi.ResourceClaim) Claim {
	out := Claim{Name: key(c)}
	read, err := claim.Read(c, device.DriverName)
	if err != nil {
		out.Problem = err.Error()
	}
	configs := c.Status.Allocation.Devices.Config
	for _, r := range c.Status.Allocation.Devices.Results {
		d := AllocatedDevice{Request: r.Request, Node: r.Pool, Device: r.Device, Admin: ptr.Deref(r.AdminAccess, false)}
		published := e.device(r)
		d.Published = published != nil
		if r.Driver != device.DriverName {
			d.OtherDriver, d.What = r.Driver, "device of "+r.Driver
			out.Devices = append(out.Devices, d)
			continue
		}
		d.What = what(r, published)
		if published != nil {
			d.Taints = taintTexts(fate{taints: published.Taints})
			for _, name := range []resourceapi.QualifiedName{"sharing", "memoryLimit"} {
				if a, has := published.Attributes[name]; has {
					d.Settings = append(d.Settings, Setting{string(name), attributeText(a), "pool"})
				}
			}
		}
		if r.ShareID != nil {
			d.Share = shareText(r.ConsumedCapacity)
			for _, h := range e.holders[pool{r.Driver, r.Pool}][r.Device] {
				if h.Claim != c {
					d.Sharers = append(d.Sharers, key(h.Claim))
				}
			}
		}
		for _, one := range read {
			if one.Pool == r.Pool && one.Device == r.Device && one.Request == r.Request {
				d.Settings = append(d.Settings, settings(one, configs)...)
				break
			}
		}
		for _, status := range c.Status.Devices {
			if status.Driver == r.Driver && status.Pool == r.Pool && status.Device == r.Device {
				d.Conditions = status.Conditions
			}
		}
		out.Devices = append(out.Devices, d)
	}
	return out
}

// device returns the published device of a result, or nil.
func (e *Explainer) device(r resourceapi.DeviceRequestAllocationResult) *resourceapi.Device {
	for _, slice := range slices.Concat(e.local[r.Pool], e.shared) {
		if slice.Spec.Driver != r.Driver || slice.Spec.Pool.Name != r.Pool {
			continue
		}
		for i := range slice.Spec.Devices {
			if slice.Spec.Devices[i].Name == r.Device {
				return &slice.Spec.Devices[i]
			}
		}
	}
	return nil
}

func what(r resourceapi.DeviceRequestAllocationResult, d *resourceapi.Device) string {
	kind, profile := "", ""
	if name, ok := device.ParseName(r.Device); ok {
		kind = name.Type()
	}
	if d != nil {
		kind, _ = attribute(pool{r.Driver, r.Pool}, d, device.DriverName+"/type")
		profile, _ = attribute(pool{r.Driver, r.Pool}, d, device.DriverName+"/profile")
	}
	return shapeName(kind, profile)
}

// settings returns the configuration in force for a device as a list of values.
func settings(r claim.Result, configs []resourceapi.DeviceAllocationConfiguration) []Setting {
	if r.Config == nil {
		return nil
	}
	text, err := json.Marshal(r.Config)
	if err != nil {
		return nil
	}
	given := map[string]string{}
	from := ""
	if r.Group >= 0 && r.Group < len(configs) && configs[r.Group].Opaque != nil {
		given = flatten(configs[r.Group].Opaque.Parameters.Raw)
		from = "claim"
		if configs[r.Group].Source == resourceapi.AllocationConfigSourceClass {
			from = "class"
		}
	}
	values := flatten(text)
	var all []Setting
	for name, value := range values {
		if name == "apiVersion" || name == "kind" {
			continue
		}
		s := Setting{name, value, "default"}
		if _, set := given[name]; set {
			s.From = from
		}
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b Setting) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// flatten returns the values of a JSON object by their path.
func flatten(text []byte) map[string]string {
	all := map[string]string{}
	var walk func(prefix string, v any)
	walk = func(prefix string, v any) {
		object, is := v.(map[string]any)
		if !is {
			all[prefix] = fmt.Sprint(v)
			return
		}
		for name, value := range object {
			walk(strings.TrimPrefix(prefix+"."+name, "."), value)
		}
	}
	var v any
	if json.Unmarshal(text, &v) == nil {
		walk("", v)
	}
	return all
}
