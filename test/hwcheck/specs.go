package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"
)

// specSet is the output of `gpu-kubelet-plugin inventory -o cdi`: the base spec, and the spec of a
// claim with every device that the node offers.
type specSet struct {
	base, claim specs.Spec
	cache       *cdi.Cache
}

// readSpecs parses printed, the plugin's output, as two CDI specs. It also writes them to folder
// and reads them with the CDI library that container runtimes use.
func readSpecs(printed, folder string) (*specSet, error) {
	s := &specSet{}
	decoder := json.NewDecoder(strings.NewReader(printed))
	for _, part := range []struct {
		name string
		spec *specs.Spec
	}{{"base", &s.base}, {"claim", &s.claim}} {
		var raw json.RawMessage
		if err := decoder.Decode(&raw); err != nil {
			return nil, fmt.Errorf("the %s spec is no JSON: %w", part.name, err)
		}
		if err := json.Unmarshal(raw, part.spec); err != nil {
			return nil, fmt.Errorf("the %s spec: %w", part.name, err)
		}
		if err := os.WriteFile(filepath.Join(folder, part.name+".json"), raw, 0o600); err != nil {
			return nil, err
		}
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is more than a base spec and a claim's spec")
	}
	var err error
	if s.cache, err = cdi.NewCache(cdi.WithSpecDirs(folder), cdi.WithAutoRefresh(false)); err != nil {
		return nil, fmt.Errorf("read the specs as a container runtime would: %w", err)
	}
	for path, errs := range s.cache.GetErrors() {
		return nil, fmt.Errorf("a container runtime would refuse %s: %w", filepath.Base(path), errors.Join(errs...))
	}
	return s, nil
}

// baseDevice returns the name of the CDI device that every container with a GPU gets, in addition
// to the devices of its GPUs.
func (s *specSet) baseDevice() string {
	return s.base.Kind + "=" + s.base.Devices[0].Name
}

// gpuDevice returns the name of the CDI device for the GPU that has this device name in the
// ResourceSlices. It returns an error if the claim's CDI spec has none.
func (s *specSet) gpuDevice(name string) (string, error) {
	for _, d := range s.claim.Devices {
		if strings.HasSuffix(d.Name, "-"+name) {
			return s.claim.Kind + "=" + d.Name, nil
		}
	}
	return "", fmt.Errorf("device %s of the ResourceSlices is not in the claim's CDI spec", name)
}

// inject adds CDI devices to a container's configuration, as a container runtime does.
func (s *specSet) inject(config *oci.Spec, devices []string) error {
	if unresolved, err := s.cache.InjectDevices(config, devices...); err != nil {
		return fmt.Errorf("apply the CDI devices %s (unknown: %v): %w", strings.Join(devices, ", "), unresolved, err)
	}
	return nil
}

// edits returns the merged container edits of these CDI devices.
func (s *specSet) edits(devices []string) specs.ContainerEdits {
	all := &cdi.ContainerEdits{ContainerEdits: &specs.ContainerEdits{}}
	for _, spec := range []*specs.Spec{&s.base, &s.claim} {
		used := false
		for i, d := range spec.Devices {
			for _, wanted := range devices {
				vendor, class, name, err := parser.ParseQualifiedName(wanted)
				if err == nil && vendor+"/"+class == spec.Kind && name == d.Name {
					all.Append(&cdi.ContainerEdits{ContainerEdits: &spec.Devices[i].ContainerEdits})
					used = true
				}
			}
		}
		if used {
			all.Append(&cdi.ContainerEdits{ContainerEdits: &spec.ContainerEdits})
		}
	}
	return *all.ContainerEdits
}

// devices returns the names of the CDI devices for a container with these GPUs.
func (s *specSet) devices(offers []offer) ([]string, error) {
	devices := []string{s.baseDevice()}
	for _, o := range offers {
		device, err := s.gpuDevice(o.name)
		if err != nil {
			return nil, err
		}
		devices = append(devices, device)
	}
	return devices, nil
}

// missing lists the mount sources, device nodes and hooks that the specs name and the machine
// lacks. It also lists every hook with another path than the given one, because runc runs hooks
// with its own privileges.
func (s *specSet) missing(hook string) []string {
	var missing []string
	look := func(e specs.ContainerEdits) {
		for _, m := range e.Mounts {
			if !exists(m.HostPath) {
				missing = append(missing, "mount source "+m.HostPath)
			}
		}
		for _, n := range e.DeviceNodes {
			if path := hostPath(n); n.Major == 0 && !isDevice(path) { // else the runtime makes it by its number
				missing = append(missing, "device node "+path)
			}
		}
		for _, h := range e.Hooks {
			if h.Path != hook || !exists(h.Path) {
				missing = append(missing, "hook "+h.Path+" (want "+hook+")")
			}
		}
	}
	look(s.base.ContainerEdits)
	for _, d := range s.claim.Devices {
		look(d.ContainerEdits)
	}
	return missing
}

func hostPath(n *specs.DeviceNode) string {
	if n.HostPath != "" {
		return n.HostPath
	}
	return n.Path
}

// mounted finds the base spec's mount of a file with this name. It returns the file's paths on the
// machine and in the container. ok is false if there is none.
func (s *specSet) mounted(name string) (host, inContainer string, ok bool) {
	for _, m := range s.base.ContainerEdits.Mounts {
		if filepath.Base(m.ContainerPath) == name {
			return m.HostPath, m.ContainerPath, true
		}
	}
	return "", "", false
}
