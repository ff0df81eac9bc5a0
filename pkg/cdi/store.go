package cdi

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/durable"
)

// These names make the CDI kinds k8s.gpu.nvidia.com/base and k8s.gpu.nvidia.com/claim, and their
// file names.
const (
	Vendor     = "k8s.gpu.nvidia.com"
	baseClass  = "base"
	claimClass = "claim"
	baseDevice = "driver"

	// ClaimKind is the CDI kind of the devices in the specs of claims.
	ClaimKind = Vendor + "/" + claimClass
	// BaseID is the CDI ID that gives a container the edits of the base spec.
	BaseID = Vendor + "/" + baseClass + "=" + baseDevice

	baseFile    = Vendor + "-" + baseClass + ".json"
	claimPrefix = Vendor + "-" + claimClass + "_"
	suffix      = ".json"
	temporary   = ".tmp-"
	// ofClaim is the suffix of the temporary file of a claim's spec. It is fixed, because calls for
	// one claim run one after another in all processes.
	ofClaim = temporary + "claim"
	// staleAge is the age at which a temporary file counts as left by a killed process.
	staleAge = time.Minute
)

// Store manages the driver's specs in the CDI directory. It is safe for concurrent use. Callers
// must serialize calls for one claim across processes.
type Store struct {
	root string
	// ofBase is the suffix of the temporary file of the base spec. It is random, because two plugin
	// instances may write that spec at once.
	ofBase string

	mu sync.Mutex // guards the files too, because all writes of the base spec use one temporary file
	// wroteBase is true once this Store has written the base spec, or found it as it should be.
	wroteBase bool
}

// NewStore keeps specs in root, a directory that the container runtime reads, such as /var/run/cdi.
func NewStore(root string) *Store {
	return &Store{root: root, ofBase: temporary + rand.Text()}
}

// ClaimDeviceName returns the name of a claim's device within the claim's spec: <claim
// UID>-<device>. If the claim has only a share of the device, -<share ID> follows.
func ClaimDeviceName(uid types.UID, device string, shareID *types.UID) string {
	name := string(uid) + "-" + device
	if shareID != nil {
		name += "-" + string(*shareID)
	}
	return name
}

// ClaimDeviceID returns the CDI ID of a claim's device.
func ClaimDeviceID(uid types.UID, device string, shareID *types.UID) string {
	return ClaimKind + "=" + ClaimDeviceName(uid, device, shareID)
}

// WriteBase writes the base spec. The edits apply to the whole spec, so the runtime applies them
// once per container, however many GPUs the container has. WriteBase refuses edits that are empty:
// they come from no scan, and the spec that is there may be good.
func (s *Store) WriteBase(edits specs.ContainerEdits) error {
	return s.write(baseFile, s.ofBase, baseSpec(edits), bytes.Equal)
}

// EnsureBase is WriteBase, but it keeps a base spec that containers can use: one with the same CUDA
// library, for whose edits usable returns nil. Another plugin instance, which may be of another
// version, may have written it.
func (s *Store) EnsureBase(edits specs.ContainerEdits, usable func(specs.ContainerEdits) error) error {
	return s.write(baseFile, s.ofBase, baseSpec(edits), func(on, data []byte) bool {
		return bytes.Equal(on, data) || isUsable(on, edits, usable)
	})
}

// isUsable reports whether containers can use the base spec that is on disk, instead of one with
// these edits.
func isUsable(on []byte, edits specs.ContainerEdits, usable func(specs.ContainerEdits) error) bool {
	var there specs.Spec
	if check(on) != nil || json.Unmarshal(on, &there) != nil {
		return false
	}
	isBase := there.Kind == Vendor+"/"+baseClass && len(there.Devices) == 1 && there.Devices[0].Name == baseDevice
	isEmpty := reflect.DeepEqual(there.ContainerEdits, specs.ContainerEdits{})
	return isBase && !isEmpty && cudaLibrary(there.ContainerEdits) == cudaLibrary(edits) && usable(there.ContainerEdits) == nil
}

// cudaLibrary returns where the host has libcuda, whose name ends with the driver's version.
func cudaLibrary(edits specs.ContainerEdits) string {
	for _, m := range edits.Mounts {
		if strings.HasPrefix(filepath.Base(m.ContainerPath), "libcuda.so.") {
			return m.HostPath
		}
	}
	return ""
}

// RewriteBase writes the base spec even if it is unchanged. Container runtimes cache the device
// numbers that they read at the first injection, until a file in the CDI directory changes. So a
// caller that finds changed device nodes must call RewriteBase. A plugin does so at its start, and
// RewriteBase removes the temporary files that an earlier one left.
func (s *Store) RewriteBase(edits specs.ContainerEdits) error {
	s.sweep()
	return s.write(baseFile, s.ofBase, baseSpec(edits), func(_, _ []byte) bool { return false })
}

// WriteClaim writes the claim's spec. Each device has a name of [ClaimDeviceName], which begins
// with the claim's UID. The runtime injects a device into any container that names it, so no name
// may fit two claims.
func (s *Store) WriteClaim(uid types.UID, devices []specs.Device) error {
	name, err := claimFile(uid)
	if err != nil {
		return err
	}
	for _, d := range devices {
		if !strings.HasPrefix(d.Name, ClaimDeviceName(uid, "", nil)) {
			return fmt.Errorf("CDI spec %s: device %q does not belong to the claim: its name does not begin with the claim's UID", name, d.Name)
		}
	}
	return s.write(name, ofClaim, &specs.Spec{Kind: ClaimKind, Devices: devices}, bytes.Equal)
}

// Render returns the base spec with the edits common and the spec of one claim with these devices,
// byte for byte as [Store] would write them. It writes no file.
func Render(common specs.ContainerEdits, devices []specs.Device) (base, claim []byte, err error) {
	var rendered [2][]byte
	for i, spec := range []*specs.Spec{baseSpec(common), {Kind: ClaimKind, Devices: devices}} {
		if rendered[i], err = encode(spec); err == nil {
			err = check(rendered[i])
		}
		if err != nil {
			return nil, nil, fmt.Errorf("CDI spec of kind %s: %w", spec.Kind, err)
		}
	}
	return rendered[0], rendered[1], nil
}

func baseSpec(edits specs.ContainerEdits) *specs.Spec {
	return &specs.Spec{
		Kind:           Vendor + "/" + baseClass,
		ContainerEdits: edits,
		Devices: []specs.Device{{
			Name: baseDevice,
			// The legacy mode of the NVIDIA Container Runtime adds the GPUs that this variable names. "void"
			// names none.
			ContainerEdits: specs.ContainerEdits{Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}},
		}},
	}
}

// RemoveClaim removes a claim's spec. If the spec is missing, it succeeds.
func (s *Store) RemoveClaim(uid types.UID) error {
	name, err := claimFile(uid)
	if err != nil {
		return err
	}
	return s.remove(name, filepath.Join(s.root, "."+name+ofClaim))
}

// RemoveBase removes the base spec and the temporary files of killed processes. If they are
// missing, it succeeds. No other plugin instance may be writing the base spec.
func (s *Store) RemoveBase() error {
	left, _ := filepath.Glob(filepath.Join(s.root, "."+baseFile+temporary+"*"))
	return s.remove(baseFile, left...)
}

// Claims lists the UIDs of the claims that have a spec in the CDI directory, or the temporary file
// of a spec that a killed process left.
func (s *Store) Claims() ([]types.UID, error) {
	entries, err := os.ReadDir(s.root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list CDI specs: %w", err)
	}
	var uids []types.UID
	for _, e := range entries {
		name := e.Name()
		if begun, ok := strings.CutSuffix(name, ofClaim); ok {
			name = strings.TrimPrefix(begun, ".")
		}
		rest, isClaim := strings.CutPrefix(name, claimPrefix)
		if uid, ok := strings.CutSuffix(rest, suffix); isClaim && ok && uid != "" {
			uids = append(uids, types.UID(uid))
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids), nil
}

// Missing returns the names of the specs that are not in the CDI directory, or no file: those of
// these claims, and the base spec if this Store has written it.
func (s *Store) Missing(claims []types.UID) (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wroteBase {
		names = append(names, baseFile)
	}
	for _, uid := range claims {
		names = append(names, claimPrefix+string(uid)+suffix)
	}
	return slices.DeleteFunc(names, func(name string) bool {
		info, err := os.Lstat(filepath.Join(s.root, name))
		return err == nil && info.Mode().IsRegular() || err != nil && !errors.Is(err, fs.ErrNotExist)
	})
}

// claimFile returns the file name of a claim's spec. It rejects a UID that would lead out of the
// directory, although the API server creates no such UID.
func claimFile(uid types.UID) (string, error) {
	if uid == "" || strings.ContainsAny(string(uid), "/\x00") {
		return "", fmt.Errorf("claim UID %q cannot name a file", uid)
	}
	return claimPrefix + string(uid) + suffix, nil
}

// write makes spec the content of the file called name, unless keep is true for what is on disk and
// this content. It does not sync the file to disk, because the plugin writes the specs again after
// a crash of the node. CDI reads only *.json and *.yaml, not the temporary file.
func (s *Store) write(name, temporarySuffix string, spec *specs.Spec, keep func(on, data []byte) bool) error {
	if name == baseFile && reflect.DeepEqual(spec.ContainerEdits, specs.ContainerEdits{}) {
		return fmt.Errorf("CDI spec %s: the scan found no driver files: wait until NVIDIA's driver is loaded", name)
	}
	data, err := encode(spec)
	if err != nil {
		return fmt.Errorf("CDI spec %s: %w", name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	path := filepath.Join(s.root, name)
	// What cannot be read, such as a pipe, is replaced.
	if on, err := (durable.OS{}).ReadFile(path); err != nil || !keep(on, data) {
		if err := check(data); err != nil {
			return fmt.Errorf("CDI spec %s: %w", name, err)
		}
		if err := os.MkdirAll(s.root, 0o755); err != nil {
			return fmt.Errorf("write CDI spec: %w", err)
		}
		if err := durable.ReplaceUnsynced(path, filepath.Join(s.root, "."+name+temporarySuffix), data); err != nil {
			return fmt.Errorf("write CDI spec: %w", err)
		}
	}
	s.wroteBase = s.wroteBase || name == baseFile
	return nil
}

// remove removes the file called name, and the temporary files.
func (s *Store) remove(name string, temporaries ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, path := range append(temporaries, filepath.Join(s.root, name)) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove CDI spec: %w", err)
		}
	}
	return nil
}

// sweep removes temporary files that killed processes left. It spares young files, because another
// plugin instance may be writing them.
func (s *Store) sweep() {
	left, _ := filepath.Glob(filepath.Join(s.root, "."+Vendor+"-*"+suffix+temporary+"*"))
	for _, path := range left {
		if info, err := os.Stat(path); err == nil && time.Since(info.ModTime()) > staleAge {
			_ = os.Remove(path)
		}
	}
}

// encode sets the lowest CDI version that the spec's content allows, because older runtimes refuse
// newer versions. It returns the spec as JSON.
func encode(spec *specs.Spec) ([]byte, error) {
	// Of several devices the library sees only the device nodes and mounts of the last one, because
	// its go.mod asks for Go 1.19, where a loop has one variable. So it sees them as the spec's own.
	all := *spec
	for _, d := range spec.Devices {
		all.ContainerEdits.DeviceNodes = slices.Concat(all.ContainerEdits.DeviceNodes, d.ContainerEdits.DeviceNodes)
		all.ContainerEdits.Mounts = slices.Concat(all.ContainerEdits.Mounts, d.ContainerEdits.Mounts)
	}
	var err error
	if spec.Version, err = specs.MinimumRequiredVersion(&all); err != nil {
		return nil, fmt.Errorf("find its version: %w", err)
	}
	return json.Marshal(spec)
}

// check returns an error if a runtime could not load the spec. One bad device makes the runtime
// refuse the whole file. The CDI library applies its rules to files only, so this one is in memory.
func check(spec []byte) error {
	fd, err := unix.MemfdCreate("cdi-spec", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("create a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "cdi-spec")
	defer func() { _ = f.Close() }()
	if _, err := f.Write(spec); err != nil {
		return err
	}
	_, err = cdilib.ReadSpec(fmt.Sprintf("/proc/self/fd/%d", fd), 0)
	return err
}

// Mapper converts a host path to the path at which this process sees the file.
type Mapper func(host string) string

// Verify checks that the files in edits exist, so that a container with these edits can start:
// device nodes without a number, mount sources and hooks. Hooks must be
// writable by root only. The error names the first file that is missing or wrong.
func (visible Mapper) Verify(edits specs.ContainerEdits) error {
	for _, n := range edits.DeviceNodes {
		if n.Major != 0 {
			continue // the runtime creates the device node by its number and needs none on the host
		}
		host := cmp.Or(n.HostPath, n.Path)
		info, err := os.Stat(visible(host))
		if err != nil {
			return fmt.Errorf("device node %s is missing on the node (%w): run nvidia-smi or nvidia-modprobe on the node to create it", host, err)
		}
		if info.Mode()&os.ModeCharDevice == 0 {
			return fmt.Errorf("%s on the node is not a character device: remove it and run nvidia-modprobe", host)
		}
	}
	for _, m := range edits.Mounts {
		if _, err := os.Stat(visible(m.HostPath)); err != nil {
			return fmt.Errorf("mount source %s is missing on the node (%w): "+
				"a driver installation that has just changed is picked up within seconds, otherwise reinstall the driver", m.HostPath, err)
		}
	}
	seen := map[string]bool{} // one program runs as several hooks
	for _, h := range edits.Hooks {
		if seen[h.Path] {
			continue
		}
		seen[h.Path] = true
		info, err := os.Stat(visible(h.Path))
		if err != nil {
			return fmt.Errorf("hook %s is missing on the node (%w): restart the plugin, which installs it", h.Path, err)
		}
		if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
			return fmt.Errorf("hook %s on the node is not an executable file", h.Path)
		}
		if err := durable.CheckFile(visible(h.Path)); err != nil {
			return fmt.Errorf("hook %s on the node: %w", h.Path, err)
		}
	}
	return nil
}
