package vfio_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/device"
	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/vfio"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/busmodel"
)

const (
	gpu   device.PCIAddress = "0000:1b:00.0"
	audio device.PCIAddress = "0000:1b:00.1"
	extra device.PCIAddress = "0000:1b:00.2"
)

// list is what a look finds on newBus.
var list = []vfio.Binding{
	{Address: audio, Driver: "snd_hda_intel", VFIO: "vfio-pci"},
	{Address: extra, Driver: "vfio-pci", Override: "vfio-pci", VFIO: "vfio-pci"}, // bound by an admin
	{Address: gpu, Driver: "nvidia", Override: "nvidia", VFIO: "nv-vfio-pci"},
}

func newBus() *busmodel.Bus {
	b := &busmodel.Bus{Drivers: []string{"nvidia", "snd_hda_intel", "vfio-pci", "nv-vfio-pci"}}
	for _, f := range list {
		native := f.Driver
		if f.Address == extra {
			native = "xhci_hcd"
		}
		b.Functions = append(b.Functions, &busmodel.Function{
			Address: f.Address, Driver: f.Driver, Override: f.Override, Native: native, Display: f.Address == gpu,
		})
	}
	return b
}

func drivers(b *busmodel.Bus) (all []string) {
	for _, f := range b.Functions {
		all = append(all, f.Driver+" "+f.Override)
	}
	return all
}

var (
	atFirst = drivers(newBus())
	bound   = []string{"vfio-pci vfio-pci", "vfio-pci vfio-pci", "nv-vfio-pci nv-vfio-pci"}
)

func idle(vfio.Binding) error { return nil }

// TestInterruptedCallsAreRepeated fails each write of Bind and of Release, before its effect, after
// it, and silently.
func TestInterruptedCallsAreRepeated(t *testing.T) {
	failed := errors.New("failed")
	for _, call := range []struct {
		name string
		do   func(context.Context, vfio.Bus, []vfio.Binding, func(vfio.Binding) error) error
		from []string
		want []string
	}{{"bind", vfio.Bind, nil, bound}, {"release", vfio.Release, bound, atFirst}} {
		for _, fault := range []string{"before", "after", "silently"} {
			for at, writes := 1, 99; at <= writes; at++ {
				b, n := newBus(), 0
				if call.from != nil {
					if err := vfio.Bind(t.Context(), b, list, idle); err != nil {
						t.Fatal(err)
					}
				}
				b.Write = func(_ busmodel.Op, effect func() error) error {
					n++
					switch {
					case n != at:
						return effect()
					case fault == "before":
						return failed
					case fault == "silently":
						return nil
					}
					return errors.Join(effect(), failed)
				}
				err := call.do(t.Context(), b, list, idle)
				if fault != "silently" && !errors.Is(err, failed) && n >= at || err == nil && !slices.Equal(drivers(b), call.want) {
					t.Errorf("%s, write %d fails %s: %v, %q", call.name, at, fault, err, drivers(b))
				}
				writes = n
				if err := call.do(t.Context(), b, list, idle); err != nil || !slices.Equal(drivers(b), call.want) {
					t.Errorf("%s again after write %d failed %s: %v, %q", call.name, at, fault, err, drivers(b))
				}
				if err := vfio.Release(t.Context(), b, list, idle); err != nil || !slices.Equal(drivers(b), atFirst) {
					t.Errorf("release after %s, write %d failed %s: %v, %q", call.name, at, fault, err, drivers(b))
				}
				if writes < at {
					break
				}
			}
		}
	}
}

func TestNothingIsTakenFromItsUsers(t *testing.T) {
	b := newBus()
	used := errors.New("used")
	busy := func(f vfio.Binding) error {
		if f.Address == gpu {
			return used
		}
		return nil
	}
	if err := vfio.Bind(t.Context(), b, list, busy); !errors.Is(err, used) || b.Functions[2].Driver != "nvidia" {
		t.Error(err, drivers(b))
	}
	if err := vfio.Bind(t.Context(), b, list, idle); err != nil {
		t.Fatal(err)
	}
	if err := vfio.Release(t.Context(), b, list, busy); !errors.Is(err, used) || !slices.Equal(drivers(b), bound) {
		t.Error(err, drivers(b))
	}
}

func TestReleaseLeavesAloneWhatOthersChanged(t *testing.T) {
	rebind := func(driver, override string) func(*busmodel.Bus) {
		return func(b *busmodel.Bus) { b.Functions[2].Driver, b.Functions[2].Override = driver, override }
	}
	for name, c := range map[string]struct {
		change func(*busmodel.Bus)
		want   string // of the GPU, empty if it is gone
	}{
		"bound to another driver":   {rebind("nouveau", "nouveau"), "nouveau nouveau"},
		"given back by an admin":    {rebind("nvidia", ""), "nvidia "},
		"unplugged":                 {func(b *busmodel.Bus) { b.Functions = b.Functions[:2] }, ""},
		"no NVIDIA driver any more": {func(b *busmodel.Bus) { b.Drivers = b.Drivers[1:] }, " nvidia"},
	} {
		b := newBus()
		if err := vfio.Bind(t.Context(), b, list, idle); err != nil {
			t.Fatal(err)
		}
		c.change(b)
		if err := vfio.Release(t.Context(), b, list, idle); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := drivers(b); c.want != "" && got[2] != c.want || got[0] != atFirst[0] {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// A driver that is loaded while a virtual machine has the GPU does not take it, and only Release
// offers it the GPU afterwards. A host may keep a companion without driver on purpose. Each write
// of the release fails once.
func TestReleasedGPUGetsTheDriverOfToday(t *testing.T) {
	failed := errors.New("failed")
	for name, c := range map[string]struct {
		first  []string // drivers at the time of Bind
		change func(*busmodel.Bus)
		want   []string // driver and override of the audio function, the admin's, and the GPU
	}{
		"loaded meanwhile": {nil, func(b *busmodel.Bus) { b.Load("nvidia"); b.Load("snd_hda_intel") },
			[]string{" ", "vfio-pci vfio-pci", "nvidia nvidia"}},
		"none": {nil, func(*busmodel.Bus) {}, []string{" ", "vfio-pci vfio-pci", " nvidia"}},
		"reloaded": {[]string{"nvidia", "snd_hda_intel"}, func(b *busmodel.Bus) {
			b.Unload("nvidia")
			b.Unload("snd_hda_intel")
			b.Load("nvidia")
			b.Load("snd_hda_intel")
		}, atFirst},
	} {
		for at := 1; ; at++ {
			b, n := newBus(), 0
			for _, driver := range []string{"nvidia", "snd_hda_intel"} {
				if !slices.Contains(c.first, driver) {
					b.Unload(driver)
				}
			}
			found := slices.Clone(list)
			for i, f := range b.Functions {
				found[i].Driver, found[i].Override = f.Driver, f.Override
			}
			if err := vfio.Bind(t.Context(), b, found, idle); err != nil {
				t.Fatal(err)
			}
			if c.change(b); !slices.Equal(drivers(b), bound) {
				t.Fatalf("%s: loading a driver took functions from VFIO: %q", name, drivers(b))
			}
			b.Write = func(_ busmodel.Op, effect func() error) error {
				if n++; n != at {
					return effect()
				}
				return failed
			}
			err := vfio.Release(t.Context(), b, found, idle)
			if n >= at && !errors.Is(err, failed) {
				t.Errorf("%s, write %d fails: %v", name, at, err)
			}
			b.Write = nil
			for range 2 {
				if err := vfio.Release(t.Context(), b, found, idle); err != nil || !slices.Equal(drivers(b), c.want) {
					t.Errorf("%s, again after write %d failed: %v, %q, want %q", name, at, err, drivers(b), c.want)
				}
			}
			if n < at {
				break
			}
		}
	}
}

// The admin's override lets nothing but VFIO take the function, whatever driver it had at first.
// Each write of Bind fails once.
func TestFunctionWhoseOwnOverrideIsVFIOStaysThere(t *testing.T) {
	failed := errors.New("failed")
	for _, driver := range []string{"nvidia", ""} {
		for at := 1; ; at++ {
			b, found, n := newBus(), slices.Clone(list), 0
			found[2].Driver, found[2].Override = driver, "nv-vfio-pci"
			b.Functions[2].Driver, b.Functions[2].Override = driver, "nv-vfio-pci"
			b.Write = func(_ busmodel.Op, effect func() error) error {
				if n++; n != at {
					return effect()
				}
				return failed
			}
			if err := vfio.Bind(t.Context(), b, found, idle); n < at && (err != nil || !slices.Equal(drivers(b), bound)) {
				t.Fatalf("%q: %v, %q", driver, err, drivers(b))
			}
			b.Write = nil
			want := "nv-vfio-pci"
			if b.Functions[2].Driver == "nvidia" {
				want = "nvidia" // Bind did not come to it
			}
			for range 2 {
				if err := vfio.Release(t.Context(), b, found, idle); err != nil ||
					!slices.Equal(drivers(b), []string{atFirst[0], atFirst[1], want + " nv-vfio-pci"}) {
					t.Errorf("%q, write %d: %v, %q, want %s", driver, at, err, drivers(b), want)
				}
			}
			if n < at {
				break
			}
		}
	}
}

func TestNoWriteBeginsAfterTheCallersEnd(t *testing.T) {
	ended, end := context.WithCancelCause(t.Context())
	why := errors.New("the parent died")
	end(why)
	b := newBus()
	if err := vfio.Bind(ended, b, list, idle); !errors.Is(err, why) || !slices.Equal(drivers(b), atFirst) {
		t.Error(err, drivers(b))
	}
}

func TestAccessWithoutNodesNamesThem(t *testing.T) {
	sysfs, dev := t.TempDir(), t.TempDir()
	dir := filepath.Join(sysfs, "bus/pci/devices", string(gpu))
	for _, folder := range []string{dir, filepath.Join(sysfs, "kernel/iommu_groups/17")} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(sysfs, "kernel/iommu_groups/17"), filepath.Join(dir, "iommu_group")); err != nil {
		t.Fatal(err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := vfio.AwaitAccess(ended, sysfs, dev, gpu, true); err == nil || !strings.Contains(err.Error(), "vfio/17") {
		t.Error(err)
	}
}
