package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// classes checks for classes that select nothing, and for two classes with one extended resource.
func classes(s *fleet.Snapshot) []Finding {
	var all []Finding
	if s.Class("gpu.nvidia.com") == nil && !s.Lacks(fleet.Classes) {
		all = append(all, Finding{Warning, "class", "DeviceClass gpu.nvidia.com does not exist",
			helmSet(s, "deviceClasses.gpu.enabled=true")})
	}
	extended := map[string][]string{}
	cache := cel.NewCache(100, cel.Features{})
	published := kinds(ours(s))
	for _, c := range s.Classes {
		if name := ptr.Deref(c.Spec.ExtendedResourceName, ""); name != "" {
			extended[name] = append(extended[name], c.Name)
		}
		if !aboutOurs(c) || len(published) == 0 {
			continue
		}
		found, err := selects(cache, c, published)
		switch {
		case err != nil:
			all = append(all, Finding{Error, "class-selector",
				fmt.Sprintf("A selector of DeviceClass %s fails, which stops scheduling: %v", c.Name, err),
				"kubectl edit deviceclass " + c.Name})
		case !found:
			all = append(all, Finding{Note, "class-empty",
				fmt.Sprintf("DeviceClass %s seems to select no published device. Then its claims wait", c.Name),
				"kubectl get deviceclass " + c.Name + " -o yaml shows its selectors"})
		}
	}
	for _, name := range sortedKeys(extended) {
		if list := extended[name]; len(list) > 1 {
			all = append(all, Finding{Warning, "extended-resource",
				fmt.Sprintf("Extended resource %s is offered by several classes: %s", name, some(list)),
				"keep it in one class only, and for each of the others: kubectl patch deviceclass " + list[0] +
					` --type=json -p '[{"op": "remove", "path": "/spec/extendedResourceName"}]'`})
		}
	}
	return all
}

// aboutOurs reports whether a class names this driver in its selectors.
func aboutOurs(c *resourceapi.DeviceClass) bool {
	return slices.ContainsFunc(c.Spec.Selectors, func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && strings.Contains(s.CEL.Expression, device.DriverName)
	})
}

// kind is what a class usually selects by. A device of each kind stands for all of that kind.
func kind(d *resourceapi.Device) string {
	var text strings.Builder
	for _, name := range []resourceapi.QualifiedName{"type", "profile", "productName", "architecture", "sharing", "driverVersionString"} {
		text.WriteString(ptr.Deref(d.Attributes[name].StringValue, "") + "|")
	}
	return text.String()
}

// kinds returns a device of each kind.
func kinds(published []*resourceapi.ResourceSlice) []*resourceapi.Device {
	seen := map[string]bool{}
	var all []*resourceapi.Device
	for _, slice := range published {
		for i := range slice.Spec.Devices {
			d := &slice.Spec.Devices[i]
			if k := kind(d); !seen[k] {
				seen[k] = true
				all = append(all, d)
			}
		}
	}
	return all
}

// selects reports whether the class selects one of the devices.
func selects(cache *cel.Cache, c *resourceapi.DeviceClass, devices []*resourceapi.Device) (bool, error) {
	for _, d := range devices {
		ok, err := matches(cache, c, d)
		if err != nil || ok {
			return ok, err
		}
	}
	return false, nil
}

func matches(cache *cel.Cache, c *resourceapi.DeviceClass, d *resourceapi.Device) (bool, error) {
	for _, s := range c.Spec.Selectors {
		if s.CEL == nil {
			return false, nil
		}
		compiled := cache.GetOrCompile(s.CEL.Expression)
		if compiled.Error != nil {
			return false, compiled.Error
		}
		ok, _, err := compiled.DeviceMatches(context.Background(), cel.Device{
			Driver: device.DriverName, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity,
		})
		if err != nil || !ok {
			return false, err
		}
	}
	return true, nil
}

// otherDrivers checks for other drivers of the same GPUs.
func otherDrivers(s *fleet.Snapshot) []Finding {
	var all []Finding
	for _, o := range s.OtherDrivers() {
		all = append(all, Finding{Note, "other-driver", fmt.Sprintf("DaemonSet %s runs %s on %d nodes", fleet.Key(o.DaemonSet), o.What,
			o.DaemonSet.Status.DesiredNumberScheduled), o.Guide})
	}
	published := s.SlicesOf()
	both := map[string]bool{}
	for _, n := range s.Nodes {
		for name, q := range n.Status.Capacity {
			if isDevicePluginResource(string(name)) && !q.IsZero() && len(published[n.Name]) > 0 {
				both[n.Name] = true
			}
		}
	}
	if len(both) > 0 {
		all = append(all, Finding{Error, "two-drivers", "NVIDIA's device plugin and this driver offer the same GPUs on " + namesIn(both),
			"kubectl label nodes " + sortedKeys(both)[0] + " gpu-driver=dra, if both have a nodeSelector for it: docs/migration.md"})
	}
	return all
}

// isDevicePluginResource is the rule of the plugin's own check (pkg/nodeview).
func isDevicePluginResource(name string) bool {
	return name == "nvidia.com/gpu" || name == "nvidia.com/gpu.shared" || strings.HasPrefix(name, "nvidia.com/mig-")
}

// predecessor checks for nodes where NVIDIA's DRA driver publishes, which has the same name.
func predecessor(s *fleet.Snapshot) []Finding {
	nodes := map[string]bool{}
	for _, slice := range ours(s) {
		for _, d := range slice.Spec.Devices {
			kind := ptr.Deref(d.Attributes["type"].StringValue, "")
			if _, known := device.ParseName(d.Name); !known && (kind == "gpu" || kind == "mig") {
				nodes[slice.Spec.Pool.Name] = true
			}
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	return []Finding{{Warning, "predecessor", "NVIDIA's DRA driver publishes the devices of " + namesIn(nodes) +
		", and this driver does not", "docs/migration.md, \"From NVIDIA's DRA driver\""}}
}

// claims checks for claims that hold devices for no Pod, or devices that are gone.
func claims(s *fleet.Snapshot) []Finding {
	names := map[fleet.DeviceID]bool{}
	for _, slice := range ours(s) {
		for _, d := range slice.Spec.Devices {
			names[fleet.DeviceID{Driver: device.DriverName, Pool: slice.Spec.Pool.Name, Device: d.Name}] = true
		}
	}
	var idle, gone []*resourceapi.ResourceClaim
	for _, c := range s.Claims {
		if c.Status.Allocation == nil {
			continue
		}
		mine := false
		for _, r := range c.Status.Allocation.Devices.Results {
			if r.Driver != device.DriverName {
				continue
			}
			mine = true
			if !names[fleet.DeviceID{Driver: r.Driver, Pool: r.Pool, Device: r.Device}] {
				gone = append(gone, c)
				break
			}
		}
		if mine && len(c.Status.ReservedFor) == 0 && c.DeletionTimestamp == nil {
			idle = append(idle, c)
		}
	}
	var all []Finding
	if len(gone) > 0 {
		all = append(all, Finding{Warning, "device-gone", "Claims have devices that are not published: " + some(keys(gone)),
			"kubectl gpu explain claim " + fleet.Key(gone[0]) + " shows the device. Delete the claim's Pods to get another one"})
	}
	if len(idle) > 0 {
		all = append(all, Finding{
			Note, "idle-claim", "Claims hold devices, but no Pod uses them: " + some(keys(idle)),
			fmt.Sprintf("kubectl delete resourceclaim %s -n %s, if no Pod will use it again", idle[0].Name, idle[0].Namespace),
		})
	}
	return all
}

func keys(claims []*resourceapi.ResourceClaim) []string {
	var names []string
	for _, c := range claims {
		names = append(names, fleet.Key(c))
	}
	return names
}
