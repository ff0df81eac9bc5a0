package conformance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/layout"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvmlsim/state"
)

// policy runs nvidia-smi compute-policy with args. It fails the test unless the command's success
// equals works and the output contains says.
func (s *site) policy(works bool, says string, args ...string) {
	s.t.Helper()
	out, err := s.smi(append([]string{"compute-policy"}, args...)...)
	if works != (err == nil) || !strings.Contains(out, says) {
		s.t.Errorf(
			"nvidia-smi compute-policy %s: %v, %s\nwant it to say %q, and that it works: %v",
			strings.Join(args, " "),
			err,
			out,
			says,
			works,
		)
	}
}

// Only nvidia-smi can set time-slices. The real nvidia-smi must be able to set and list them with
// the simulated library.
func TestRealNvidiaSMISetsTimeSlices(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Host, realSMI(t))
	uuid := s.options.Config.Node.GPUs[2].UUID
	for value, name := range []string{"Default", "Short", "Medium", "Long", "Default"} {
		value %= 4
		s.policy(true, "Successfully set timeslice policy with value "+name+" for GPU 2", "-i", uuid, fmt.Sprintf("--set-timeslice=%d", value))
		s.policy(true, fmt.Sprintf("|   2   Timeslice       %-14s|", name), "-i", "2", "-l")
		s.change(func(_ *layout.Config, f *state.File) error {
			if got := f.GPU(2).TimeSlice; got != uint32(value) {
				t.Errorf("time-slice %d, want %d", got, value)
			}
			return nil
		})
	}
	s.policy(false, "Invalid Argument", "-i", "2", "--set-timeslice=4")
	s.policy(true, "|   7   Timeslice       Default       |", "-l")
}

// With a UUID, nvidia-smi queries every GPU, so the command must fail if any GPU is lost. With an
// index of a healthy GPU it must succeed.
func TestIndexIgnoresLostNeighbour(t *testing.T) {
	s := newSite(t, "dgx-h100", layout.Host, realSMI(t))
	s.change(func(_ *layout.Config, f *state.File) error { return f.Lose(5) })
	s.policy(false, "GPU is lost", "-i", s.options.Config.Node.GPUs[2].UUID, "--set-timeslice=1")
	s.policy(true, "Successfully", "-i", "2", "--set-timeslice=1")
	s.policy(false, "GPU is lost", "-i", "5", "--set-timeslice=1")
}

func TestGPUsWithoutTimeSlices(t *testing.T) {
	s := newSite(t, "p4-x2", layout.Host, realSMI(t))
	s.policy(false, "Failed to set timeslice policy with value Short for GPU 1 : Not Supported", "-i", "1", "--set-timeslice=1")
	s.policy(false, "Failed to get compute policies for GPU 1 : Not Supported", "-i", "1", "-l")
}

func TestFaultsOfTimeSlices(t *testing.T) {
	s := newSite(t, "l40s-x2", layout.Host, realSMI(t))
	s.change(func(_ *layout.Config, f *state.File) error {
		return f.AddFault(state.Fault{Kind: state.FaultFail, Error: uint32(nvml.ERROR_UNKNOWN), GPU: 1}, "setTimeSlice", 1)
	})
	s.policy(true, "Successfully", "-i", "0", "--set-timeslice=3")
	s.policy(false, "Unknown Error", "-i", "1", "--set-timeslice=3")
	s.policy(true, "Successfully", "-i", "1", "--set-timeslice=3")
}

// settings returns one GPU's compute mode, time-slice and persistence mode in the state file, as
// text to compare.
func settings(g *state.GPU) string {
	return fmt.Sprintf("compute mode %d, time-slice %d, persistence %d", g.ComputeMode, g.TimeSlice, g.PersistenceMode)
}

// A driver load and a GPU reset must reset a GPU's settings. Without persistence mode, so must the
// last process that closes the GPU.
func TestSettingsAreReset(t *testing.T) {
	const untouched = "compute mode 0, time-slice 0, persistence 1"
	set := func(t *testing.T, w *world, persistence nvml.EnableState) {
		t.Helper()
		library := initialize(t)
		device := devices(t, library)[1]
		want(t, "set persistence mode", device.SetPersistenceMode(persistence), nvml.SUCCESS)
		want(t, "set compute mode", device.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.SUCCESS)
		w.must(w.state.SetTimeSlice(1, 2))
		want(t, "shutdown", library.Shutdown(), nvml.SUCCESS)
	}
	check := func(t *testing.T, w *world, want string) {
		t.Helper()
		library := initialize(t)
		_ = devices(t, library)
		if got := settings(w.state.GPU(1)); got != want {
			t.Errorf("%s; want %s", got, want)
		}
		_ = library.Shutdown()
	}
	t.Run("kept while persistence mode is on", func(t *testing.T) {
		w := newWorld(t, readNode(t, "l40s-x2"))
		set(t, w, nvml.FEATURE_ENABLED)
		check(t, w, "compute mode 3, time-slice 2, persistence 1")
	})
	t.Run("forgotten with the last one who has it open", func(t *testing.T) {
		w := newWorld(t, readNode(t, "l40s-x2"))
		set(t, w, nvml.FEATURE_DISABLED)
		check(t, w, "compute mode 0, time-slice 0, persistence 0")
	})
	t.Run("kept by a driver that keeps settings", func(t *testing.T) {
		node := readNode(t, "l40s-x2")
		node.SettingsStay = true
		w := newWorld(t, node)
		set(t, w, nvml.FEATURE_DISABLED)
		check(t, w, "compute mode 3, time-slice 2, persistence 0")
	})
	t.Run("kept while another has it open, even if that one is killed later", func(t *testing.T) {
		w := newWorld(t, readNode(t, "l40s-x2"))
		holder := start(t, "hold", gpuVariable+"=1")
		holder.expect("ready")
		set(t, w, nvml.FEATURE_DISABLED)
		check(t, w, "compute mode 3, time-slice 2, persistence 0")
		holder.kill()
		check(t, w, "compute mode 0, time-slice 0, persistence 0")
	})
	t.Run("one who holds another GPU keeps nothing", func(t *testing.T) {
		w := newWorld(t, readNode(t, "l40s-x2"))
		start(t, "hold", gpuVariable+"=0").expect("ready")
		set(t, w, nvml.FEATURE_DISABLED)
		check(t, w, "compute mode 0, time-slice 0, persistence 0")
	})
	t.Run("shown as forgotten before anybody opens it again", func(t *testing.T) {
		w := newWorld(t, readNode(t, "l40s-x2"))
		set(t, w, nvml.FEATURE_DISABLED)
		w.must(w.state.Settle())
		if got := settings(w.state.GPU(1)); got != "compute mode 0, time-slice 0, persistence 0" {
			t.Error(got)
		}
	})
	t.Run("reset", func(t *testing.T) {
		w := newWorld(t, readNode(t, "l40s-x2"))
		set(t, w, nvml.FEATURE_ENABLED)
		w.must(w.state.Reset(1, false))
		check(t, w, untouched)
	})
	t.Run("driver load", func(t *testing.T) {
		w := newWorld(t, readNode(t, "l40s-x2"))
		set(t, w, nvml.FEATURE_ENABLED)
		w.must(w.state.Load("", "", false))
		check(t, w, untouched)
	})
}

// In MIG mode a GPU must accept only the default compute mode.
func TestComputeModeInMIGMode(t *testing.T) {
	newWorld(t, manyOf(t, "h100-sxm5-80gb", 1)).onHost()
	device := devices(t, initialize(t))[0]
	want(t, "set compute mode", device.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.SUCCESS)
	_, ret := device.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	want(t, "MIG on", ret, nvml.SUCCESS)
	mode, ret := device.GetComputeMode()
	want(t, "compute mode", ret, nvml.SUCCESS)
	if mode != nvml.COMPUTEMODE_DEFAULT {
		t.Errorf("compute mode %d in MIG mode", mode)
	}
	want(t, "exclusive process", device.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.ERROR_NOT_SUPPORTED)
	_, ret = device.SetMigMode(nvml.DEVICE_MIG_DISABLE)
	want(t, "MIG off", ret, nvml.SUCCESS)
	mode, _ = device.GetComputeMode()
	if mode != nvml.COMPUTEMODE_DEFAULT {
		t.Errorf("compute mode %d after MIG mode", mode)
	}
	want(t, "exclusive process", device.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS), nvml.SUCCESS)
}
