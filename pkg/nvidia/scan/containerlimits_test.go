package scan

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

func TestContainerLimitsNeedDriverProof(t *testing.T) {
	const group = "/sys/fs/cgroup/kubepods/plugin"
	for name, tc := range map[string]struct {
		group   string
		missing string
		answer  nvml.Return
		noSMI   bool
		want    bool
	}{
		"a driver of r615":                        {group: group, want: true},
		"no cgroup v2":                            {group: ""},
		"an older driver":                         {group: group, missing: memoryLimitsFunction},
		"a card or a kernel without support":      {group: group, answer: nvml.ERROR_NOT_SUPPORTED},
		"a group unknown to the driver":           {group: group, answer: nvml.ERROR_NOT_FOUND},
		"a hierarchy that the driver cannot read": {group: group, answer: nvml.ERROR_OPERATING_SYSTEM},
		"no nvidia-smi, which sets the limits":    {group: group, noSMI: true},
	} {
		t.Run(name, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			if !tc.noSMI {
				h.File("driver/usr/bin/nvidia-smi", "no ELF")
				if err := os.Chmod(filepath.Join(h.Root, "driver/usr/bin/nvidia-smi"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			library := nvidiatest.NVML(nvidiatest.TwoCards()...)
			library.ExtensionsFunc = func() nvml.ExtendedInterface {
				return &mock.ExtendedInterface{LookupSymbolFunc: func(name string) error {
					if name == tc.missing {
						return errors.New("undefined symbol")
					}
					return nil
				}}
			}
			s := scannerOf(h, library)
			s.group = tc.group
			card := &mock.Device{GetMemoryLimits_v1Func: func(asked string) (nvml.MemoryLimits_v1, nvml.Return) {
				if asked != group {
					t.Errorf("queried %q", asked)
				}
				return nvml.MemoryLimits_v1{}, tc.answer
			}}
			if got := s.containerLimits(card); got != tc.want {
				t.Errorf("got %t", got)
			}
		})
	}
}

func TestOwnGroup(t *testing.T) {
	if got := ownGroup("/proc", t.TempDir()); got != "" {
		t.Errorf("a directory without cgroup v2 has %q", got)
	}
	if got := ownGroup("/proc", ""); got != "" {
		t.Errorf("without a root it is %q", got)
	}
	for text, want := range map[string]string{
		"0::/kubepods/pod1/c1\n":             "/cg/kubepods/pod1/c1",
		"0::/\n":                             "/cg",
		"12:memory:/x\n0::/kubepods/../../y": "/cg/y",
		"12:memory:/x\n":                     "",
	} {
		proc := t.TempDir()
		if err := os.Mkdir(filepath.Join(proc, "self"), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(proc, "self", "cgroup"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := groupBelow(proc, "/cg"); got != want {
			t.Errorf("%q: %q", text, got)
		}
	}
}
