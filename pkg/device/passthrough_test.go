package device

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/model"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/scheduler"
)

func TestLastMatchingPassthroughRuleApplies(t *testing.T) {
	h100 := GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-Abc", ProductName: "NVIDIA H100 80GB HBM3"}
	for settings, want := range map[string]bool{
		"":               false,
		"enabled: true":  true,
		"enabled: false": false,
		"rules: [{gpus: NVIDIA H100*, enabled: true}]":                                         true,
		"{enabled: true, rules: [{gpus: '0000:1b:00.0', enabled: false}]}":                     false,
		"{enabled: true, rules: [{gpus: '0000:43:00.0', enabled: false}]}":                     true,
		"rules: [{gpus: gpu-abc, enabled: true}, {enabled: false}]":                            false,
		"rules: [{enabled: false}, {gpus: '*a100*', enabled: true}, {enabled: true}]":          true,
		"{enabled: false, rules: [{gpus: '*a100*', enabled: true}, {gpus: x, enabled: true}]}": false,
	} {
		p, errs := fromYAML[PassthroughSettings](t, settings).Policies(nil)
		if got := p.For(h100); errs != nil || got.Passthrough != want || got.Mode != PolicyStatic {
			t.Errorf("%q: %+v, %v; want %t", settings, got, errs, want)
		}
	}
	mig, _ := MIGSettings{Policy: PolicyDynamic}.Policies(nil)
	on, _ := PassthroughSettings{Enabled: ptr.To(true)}.Policies(nil)
	off, _ := PassthroughSettings{Enabled: ptr.To(false)}.Policies(nil)
	if got := mig.And(on).For(h100); got.Mode != PolicyDynamic || !got.Passthrough {
		t.Errorf("both settings together are %+v", got)
	}
	if mig.And(on).And(off).For(h100).Passthrough || !mig.And(on).And(Policies{}).For(h100).Passthrough {
		t.Error("the annotation does not take precedence, or counts although it is empty")
	}
}

func TestInvalidPassthroughNamesTheField(t *testing.T) {
	for settings, says := range map[string]string{
		"rules: [{gpus: '*'}]":                                 "passthrough.rules[0].enabled: Required value: want true or false",
		"rules: [{enabled: true}, {gpus: '[', enabled: true}]": `passthrough.rules[1].gpus: Invalid value: "[": is not a selector`,
	} {
		_, errs := fromYAML[PassthroughSettings](t, settings).Policies(field.NewPath("passthrough"))
		if !strings.Contains(fmt.Sprint(errs), says) {
			t.Errorf("%q: %v; want %q", settings, errs, says)
		}
	}
}

func TestDecidePassthrough(t *testing.T) {
	possible := func(g *GPU) { g.Passthrough = &Passthrough{} }
	for _, c := range []struct {
		name     string
		gpu      func(*GPU)
		mode     PolicyMode
		on       bool
		counters bool
		want     []string
		says     string
	}{
		{"off", possible, PolicyStatic, false, true, []string{wholeName}, ""},
		{"static", possible, PolicyStatic, true, true, []string{wholeName, vfioName}, ""},
		{"dynamic", possible, PolicyDynamic, true, true, []string{wholeName, vfioName, firstName, lastName, twoName}, ""},
		{"impossible", func(g *GPU) { g.NoPassthrough = "it has no IOMMU group" }, PolicyStatic, true, true, []string{wholeName},
			"not offered to virtual machines: it has no IOMMU group"},
		{"unknown", func(*GPU) {}, PolicyStatic, true, true, []string{wholeName}, "off in the plugin's settings"},
		{"without counters", possible, PolicyStatic, true, false, []string{wholeName}, "DRAPartitionableDevices"},
		{"an admin's instance", func(g *GPU) { possible(g); g.MIG.Enabled, g.MIG.Instances = true, []Instance{instance(7, 0)} },
			PolicyDynamic, true, true, []string{firstName}, "no claim created"},
		{"MIG mode that only a reset ends", func(g *GPU) { possible(g); g.MIG.ModeFixed, g.MIG.Enabled, g.MIG.Pending = true, true, true },
			PolicyDynamic, true, true, []string{firstName, lastName, twoName}, "not offered whole"},
		{"bound to VFIO by no claim", func(g *GPU) { *g = GPU{PCIAddress: g.PCIAddress, Passthrough: &Passthrough{BoundByAdmin: true}} },
			PolicyDynamic, true, false, []string{vfioName}, "echo A > /sys/bus/pci/drivers_probe"},
		{"bound to VFIO by a claim, or without a driver", func(g *GPU) { *g = GPU{PCIAddress: g.PCIAddress, Passthrough: &Passthrough{}} },
			PolicyDynamic, true, false, []string{vfioName}, ""},
		{"bound to VFIO, off", func(g *GPU) { *g = GPU{PCIAddress: g.PCIAddress, Passthrough: &Passthrough{}} },
			PolicyDynamic, false, true, nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := small()
			g.UUID = "GPU-1"
			c.gpu(&g)
			layout, reason := Decide(g, nil, Policy{Mode: c.mode, Passthrough: c.on}, c.counters)
			var names []string
			for _, s := range Offer([]Offering{{GPU: g, Layout: layout}}) {
				names = append(names, s.Name())
			}
			if slices.Sort(names); !slices.Equal(names, slices.Sorted(slices.Values(c.want))) {
				t.Errorf("offered %v, want %v", names, c.want)
			}
			if !strings.Contains(reason, c.says) || c.says == "" && reason != "" {
				t.Errorf("reason %q, want %q", reason, c.says)
			}
		})
	}
}

// Devices for virtual machines come after whole GPUs and before shares, and take all counters.
func TestOrderAndCountersOfVFIODevices(t *testing.T) {
	a, b := small(), small()
	b.PCIAddress = "0000:43:00.0"
	offerings := []Offering{
		{GPU: a, Layout: Layout{Whole: true, VFIO: true}, Shares: shareRules(t, "[{kind: shares, count: 2}]")},
		{GPU: b, Layout: Layout{Whole: true, VFIO: true, Placements: true}},
	}
	var names []string
	shapes := Offer(offerings)
	for _, s := range shapes[:5] {
		names = append(names, s.Name())
	}
	other := b.WholeName()
	if diff := cmp.Diff([]string{wholeName, other, vfioName, other + "-vfio", wholeName + "-share"}, names); diff != "" {
		t.Error(diff)
	}
	devices := Slices(shapes, Driver{}, false)[1].Devices
	if diff := cmp.Diff(devices[0].ConsumesCounters, devices[2].ConsumesCounters); diff != "" {
		t.Errorf("the device for virtual machines takes other counters than the whole GPU: %s", diff)
	}
}

// A GPU is given to a container or to a virtual machine, never to both, on all known models.
func TestAllocatorGivesEachGPUOnceWithPassthrough(t *testing.T) {
	forEachModel(t, func(t *testing.T, known *model.GPU) {
		for _, mode := range []PolicyMode{PolicyStatic, PolicyDynamic} {
			g := fromModel(known)
			g.PCIAddress, g.UUID, g.Passthrough = "0000:01:00.0", "GPU-1", &Passthrough{VendorID: 0x10de}
			free := GPU{PCIAddress: "0000:02:00.0", Passthrough: &Passthrough{BoundByAdmin: true}}
			m := offered(t, offerUnder(Policy{Mode: mode, Passthrough: true}, g, free), Driver{Version: "580.65.06"})
			checkAPILimits(t, m)
			whole, vm := count(1), count(1)
			vm.Exactly.DeviceClassName = vfioClass
			taken := scheduler.NewTaken()
			if got := m.allocate(taken, requests(vm)); !slices.Equal(got, []string{g.WholeName() + "-vfio"}) {
				t.Errorf("%s: a virtual machine got %v", mode, got)
			}
			if got := m.allocate(taken, requests(whole)); got != nil {
				t.Errorf("%s: a container got the virtual machine's GPU as %v", mode, got)
			}
			if got := m.allocate(taken, requests(partitions(1))); got != nil {
				t.Errorf("%s: a container got the virtual machine's GPU as %v", mode, got)
			}
			if got := m.allocate(taken, requests(vm)); !slices.Equal(got, []string{free.WholeName() + "-vfio"}) {
				t.Errorf("%s: a second virtual machine got %v", mode, got)
			}
			taken.Clear()
			if mode == PolicyStatic && known.MIG.Supported.Value && fromModel(known).MIG.ModeFixed {
				continue
			}
			if got := m.allocate(taken, requests(whole)); !slices.Equal(got, []string{g.WholeName()}) {
				t.Errorf("%s: a container got %v", mode, got)
			}
			if got := m.allocate(taken, requests(vm)); !slices.Equal(got, []string{free.WholeName() + "-vfio"}) {
				t.Errorf("%s: a virtual machine got %v", mode, got)
			}
		}
	})
}
