package allocation

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/settingstest"
)

// request is one request that a random claim may contain. Its DeviceClass selects the devices,
// because the allocator would need longer for CEL selectors in each claim. matches reports whether
// the DeviceClass selects a device.
type request struct {
	class    string
	matches  func(device.Name) bool
	capacity amounts // the requested capacity, for shares
}

// publish publishes the GPUs' slices to the allocator as the plugin does, and collects all possible
// requests for their devices.
func (c *cluster) publish(gpus []device.GPU) {
	c.t.Helper()
	rules, err := settingstest.Shares(shareRules)
	must(c.t, "read the rules", err)
	var offerings []device.Offering
	for _, g := range gpus {
		as, reason := device.Decide(g, nil, device.Policy{Mode: device.PolicyDynamic}, true)
		if !as.Placements {
			c.t.Fatal(reason)
		}
		offerings = append(offerings, device.Offering{GPU: g, Layout: as, Shares: rules})
	}
	shapes := device.Offer(offerings)
	c.names, c.requests = nil, nil
	classes := scheduler.Classes{}
	request := func(expression string, often int, matches func(device.Name) bool, capacity ...amounts) {
		if classes[expression] != "" {
			return
		}
		classes[expression] = expression
		for _, a := range append(capacity, nil) {
			c.requests = append(c.requests, slices.Repeat([]request{{expression, matches, a}}, often)...)
		}
	}
	gib := func(n int64) amounts {
		return amounts{device.CapacityMemory: *resource.NewQuantity(n<<30, resource.BinarySI)}
	}
	for _, s := range shapes {
		name, ok := device.ParseName(s.Name())
		if !ok {
			c.t.Fatalf("%s is no device name", s.Name())
		}
		c.names = append(c.names, name)
		const is = `device.attributes["gpu.nvidia.com"].`
		if name.Partition == nil && name.Share {
			request(is+`type == "gpu-share"`, 6, func(n device.Name) bool { return n.Partition == nil && n.Share }, gib(7), gib(18))
			continue
		}
		if name.Partition == nil {
			request(is+`type == "gpu"`, 2, func(n device.Name) bool { return n.Partition == nil && !n.Share })
			continue
		}
		profile, start := name.Partition.ProfileID, name.Partition.Start
		ofProfile := func(n device.Name) bool {
			return n.Partition != nil && n.Share == name.Share && n.Partition.ProfileID == profile
		}
		if name.Share {
			request(fmt.Sprintf(is+`type == "mig-share" && `+is+"profileID == %d", profile), 3, ofProfile, gib(7))
			continue
		}
		of := fmt.Sprintf(is+`type == "mig" && `+is+"profileID == %d", profile)
		request(of, 3, ofProfile)
		request(fmt.Sprintf("%s && "+is+"placementStart == %d", of, start), 1,
			func(n device.Name) bool { return ofProfile(n) && n.Partition.Start == start })
	}
	c.Scheduler = scheduler.New(driverName, device.Slices(shapes, device.Driver{Version: "580.65.06", CUDAVersion: "13.0"}, false), classes)
	c.accounts = newBooks(c.Slices)
	c.hardware.fractions = map[string]bool{}
	for name, capacity := range c.accounts.published {
		_, memory := capacity[device.CapacityMemory]
		c.hardware.fractions[name] = memory
	}
}

func classNames(requests []request) string {
	var all []string
	for _, w := range requests {
		all = append(all, w.class)
	}
	return strings.Join(all, " + ")
}
