package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/cmd/kubectl-gpu/internal/fleet"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
)

// classes checks for classes that select nothing, and for two classes with one extended resource.
func classes(s *fleet.Snapshot) []Finding {
	var all []Finding
	if s.Class("gpu.nvidia.com") == nil {
		all = append(all, Finding{Warning, "class", "DeviceClass gpu.nvidia.com does not exist",
			"set deviceClasses.gpu.enabled=true in the chart's values"})
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
				fmt.Sprintf("DeviceClass %s seems to select no published device. Then its claims wait", c.Name), ""})
		}
	}
	for _, name := range sorted(extended) {
		if list := extended[name]; len(list) > 1 {
			all = append(all, Finding{Warning, "extended-resource",
				fmt.Sprintf("Extended resource %s is offered by several classes: %s", name, some(list)),
				"remove spec.extendedResourceName from all but one"})
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

func containerOf(image string) func(corev1.Container) bool {
	return func(c corev1.Container) bool { return strings.Contains(c.Image, image) }
}

// others has a part of the image's name of each driver that also offers NVIDIA GPUs.
var others = []struct{ image, what, guide string }{
	{"k8s-device-plugin", "NVIDIA's device plugin", "docs/migration.md, \"From NVIDIA's device plugin\""},
	{"gpu-operator", "the GPU Operator", "docs/migration.md, \"From NVIDIA's device plugin\""},
	{"k8s-dra-driver-gpu", "NVIDIA's DRA driver", "docs/migration.md, \"From NVIDIA's DRA driver\""},
	{"dra-driver-nvidia-gpu", "NVIDIA's DRA driver", "docs/migration.md, \"From NVIDIA's DRA driver\""},
	{"mig-manager", "the MIG manager, which changes partitions", "docs/migration.md"},
}

// otherDrivers checks for other drivers of the same GPUs.
func otherDrivers(s *fleet.Snapshot) []Finding {
	var all []Finding
	for _, d := range s.DaemonSets {
		for _, o := range others {
			if slices.ContainsFunc(d.Spec.Template.Spec.Containers, containerOf(o.image)) {
				all = append(all, Finding{Note, "other-driver", fmt.Sprintf("DaemonSet %s runs %s on %d nodes", fleet.Key(d), o.what,
					d.Status.DesiredNumberScheduled), o.guide})
				break
			}
		}
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
			"keep one of the two off these nodes with a nodeSelector: docs/migration.md"})
	}
	return all
}

// isDevicePluginResource is the rule of the plugin's own check (pkg/nodeview).
func isDevicePluginResource(name string) bool {
	return name == "nvidia.com/gpu" || name == "nvidia.com/gpu.shared" || strings.HasPrefix(name, "nvidia.com/mig-")
}

// claims checks for claims that hold devices for no Pod, or devices that are gone.
func claims(s *fleet.Snapshot) []Finding {
	names := map[fleet.DeviceID]bool{}
	for _, slice := range ours(s) {
		for _, d := range slice.Spec.Devices {
			names[fleet.DeviceID{Driver: device.DriverName, Pool: slice.Spec.Pool.Name, Device: d.Name}] = true
		}
	}
	var idle, gone []string
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
				gone = append(gone, fleet.Key(c))
				break
			}
		}
		if mine && len(c.Status.ReservedFor) == 0 && c.DeletionTimestamp == nil {
			idle = append(idle, fleet.Key(c))
		}
	}
	var all []Finding
	if len(gone) > 0 {
		all = append(all, Finding{Warning, "device-gone", "Claims have devices that are not published: " + some(gone),
			"kubectl gpu explain claim NAME -n NAMESPACE shows the device. Delete the claim's Pods to get another one"})
	}
	if len(idle) > 0 {
		all = append(all, Finding{Note, "idle-claim", fmt.Sprintf("%d claims hold devices, but no Pod uses them: %s", len(idle), some(idle)),
			"kubectl delete resourceclaim NAME -n NAMESPACE, if no Pod will use it again"})
	}
	return all
}
