package scan

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/nvidia/internal/host"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/driverzoo"
	"github.com/gpu-dra-driver/gpu-dra-driver/test/nvidiatest"
)

// The test expects that containers get the driver's files of every kind of host: each at the path
// at which programs look for it, from the path at which the container runtime finds it without a
// link.
func TestContainersGetTheFilesOfEveryDriverRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: device nodes with groups, another root directory")
	}
	roots, err := driverzoo.All(nvidiatest.Version)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range roots {
		t.Run(r.Name, func(t *testing.T) {
			h := nvidiatest.NewHost(t)
			machine := filepath.Join(h.Root, "machine")
			h.Must(r.Install(machine, func(string) string { return "" }))
			h.Must(r.MakeDevices(machine, "0000:c3:00.0", func(string) int { return 0 }))
			var drm []string
			if r.Devices.DRMMode != "" && r.DeviceRoot(machine) == machine {
				drm = []string{"card0", "renderD128"}
			}
			for _, name := range drm {
				h.File("sys/bus/pci/devices/0000:c3:00.0/drm/"+name+"/dev", "226:0")
			}
			s := scannerOf(h, nvidiatest.NVML(nvidiatest.TwoCards()[:1]...))
			s.paths.DriverRoot, s.paths.HostDriverRoot = filepath.Join(machine, r.DriverRoot), r.DriverRoot
			s.paths.DevRoot = r.DeviceRoot(machine)
			if s.path, err = host.Library(s.paths); err != nil {
				t.Fatal(err)
			}
			node, err := s.scan(t.Context())
			if err != nil || len(node.GPUs) != 1 {
				t.Fatal(err, node.Problems)
			}
			if got, _ := graphicsOf(node.GPUs[0].Edits); !slices.Equal(got, drm) {
				t.Errorf("the GPU's DRM nodes are %v, want %v", got, drm)
			}
			mounts := map[string]string{}
			for _, m := range node.Common.Mounts {
				mounts[m.ContainerPath] = m.HostPath
				found := filepath.Join(machine, m.HostPath)
				if leads, err := filepath.EvalSymlinks(found); err != nil || leads != found {
					t.Errorf("the source of %s, %s, leads to %s (%v)", m.ContainerPath, m.HostPath, leads, err)
				}
			}
			if diff := cmp.Diff(r.Wanted(), mounts); diff != "" {
				t.Errorf("mounts (-want +got):\n%s", diff)
			}
			if want, got := r.ControlGroups(), node.Common.AdditionalGIDs; !slices.Equal(got, want) {
				t.Errorf("containers get the groups %v, want %v", got, want)
			}
			sources := slices.Collect(maps.Values(mounts))
			if smi, err := s.paths.Program("nvidia-smi"); err != nil || !slices.Contains(sources, s.paths.Host(smi.Path)) {
				t.Errorf("the plugin runs %v (%v), which is not what containers get", smi, err)
			}
			var missing []string
			for _, p := range node.Omissions {
				missing = append(missing, p.Name)
			}
			if diff := cmp.Diff(r.Missing, missing); diff != "" {
				t.Errorf("missing (-want +got):\n%s", diff)
			}
		})
	}
}
