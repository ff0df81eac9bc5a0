package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"
)

// These names make the CDI kinds k8s.gpu.nvidia.com/base and k8s.gpu.nvidia.com/claim, and their
// file names.
const (
	Vendor     = "k8s.gpu.nvidia.com"
	baseClass  = "base"
	claimClass = "claim"
	baseDevice = "driver"

	baseFile    = Vendor + "-" + baseClass + ".json"
	claimPrefix = Vendor + "-" + claimClass + "_"
	suffix      = ".json"
	temporary   = ".tmp-"
	// ofClaim is the suffix of the temporary file of a claim's spec.
	ofClaim = temporary + "claim"
)

// Store manages the driver's specs in the CDI directory. It is safe for concurrent use. Callers
// must serialize calls for one claim across processes.
type Store struct {
	root string

	mu sync.Mutex // guards the files too, so that Watch never sees a half-done change of this Store
	// known is each file as this Store last wrote it, or as it read it when another plugin instance
	// wrote it. Watch compares it with the disk to detect changes by other programs.
	known map[string]specFile
	// damaged are the files that another program removed or changed, until they are written again.
	damaged map[string]bool
	// repaired are the damaged files that were written again, until Watch reports them.
	repaired []string
}

// specFile is the content of a file, and its info by which an unchanged file is recognized.
type specFile struct {
	data []byte
	info os.FileInfo
}

// NewStore keeps specs in root, a directory that the container runtime reads, such as /var/run/cdi.
func NewStore(root string) *Store {
	return &Store{root: root, known: map[string]specFile{}, damaged: map[string]bool{}}
}

// ClaimDevice is one device of a claim with its edits.
type ClaimDevice struct {
	// Name is the part of the CDI ID after the "=", as [ClaimDeviceName] returns it.
	Name  string
	Edits specs.ContainerEdits
}

// BaseID returns the CDI ID that gives a container the edits of the base spec.
func BaseID() string { return parser.QualifiedName(Vendor, baseClass, baseDevice) }

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
	return parser.QualifiedName(Vendor, claimClass, ClaimDeviceName(uid, device, shareID))
}

// WriteBase writes the base spec. The edits apply to the whole spec, so the runtime applies them
// once per container, however many GPUs the container has.
func (s *Store) WriteBase(edits specs.ContainerEdits) error { return s.writeBase(edits, false) }

// RewriteBase writes the base spec even if it is unchanged. Container runtimes cache the device
// numbers that they read at the first injection, until a file in the CDI directory changes. So a
// caller that finds changed device nodes must call RewriteBase.
func (s *Store) RewriteBase(edits specs.ContainerEdits) error { return s.writeBase(edits, true) }

func (s *Store) writeBase(edits specs.ContainerEdits, always bool) error {
	data, err := encode(baseSpec(edits))
	if err != nil {
		return fmt.Errorf("CDI spec %s: %w", baseFile, err)
	}
	return s.write(baseFile, data, always)
}

// WriteClaim writes the claim's spec. Each device name must begin with the claim's UID. The runtime
// injects a device into any container that names it, so no name may fit two claims.
func (s *Store) WriteClaim(uid types.UID, devices []ClaimDevice) error {
	name, err := claimFile(uid)
	if err != nil {
		return err
	}
	for _, d := range devices {
		if !strings.HasPrefix(d.Name, ClaimDeviceName(uid, "", nil)) {
			return fmt.Errorf("CDI spec %s: device %q does not belong to the claim: its name does not begin with the claim's UID", name, d.Name)
		}
	}
	data, err := encode(claimSpec(devices))
	if err != nil {
		return fmt.Errorf("CDI spec %s: %w", name, err)
	}
	return s.write(name, data, false)
}

// RemoveClaim removes a claim's spec. If the spec is missing, it succeeds.
func (s *Store) RemoveClaim(uid types.UID) error {
	name, err := claimFile(uid)
	if err != nil {
		return err
	}
	return s.remove(name)
}

// RemoveBase removes the base spec and the temporary files of killed processes. If they are
// missing, it succeeds. No other plugin instance may be writing the base spec.
func (s *Store) RemoveBase() error {
	left, _ := filepath.Glob(filepath.Join(s.root, "."+baseFile+temporary+"*"))
	for _, path := range left {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove CDI spec: %w", err)
		}
	}
	return s.remove(baseFile)
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
		if uid, ok := claimOf(name); ok {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids), nil
}

// isSpec reports whether name is the file name of a base spec or claim spec.
func isSpec(name string) bool {
	_, claim := claimOf(name)
	return claim || name == baseFile
}

func claimOf(name string) (types.UID, bool) {
	rest, ok := strings.CutPrefix(name, claimPrefix)
	if !ok {
		return "", false
	}
	uid, ok := strings.CutSuffix(rest, suffix)
	return types.UID(uid), ok && uid != ""
}

// claimFile returns the file name of a claim's spec. It rejects a UID that would lead out of the
// directory, although the API server creates no such UID.
func claimFile(uid types.UID) (string, error) {
	if uid == "" || strings.ContainsAny(string(uid), "/\x00") {
		return "", fmt.Errorf("claim UID %q cannot name a file", uid)
	}
	return claimPrefix + string(uid) + suffix, nil
}

// write makes data the content of the file called name. It replaces a file that has this content
// only if always is true.
func (s *Store) write(name string, data []byte, always bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := filepath.Join(s.root, name)
	on, err := os.ReadFile(path)
	differs := err != nil || !bytes.Equal(on, data)
	if differs || always {
		if err := replace(path, data); err != nil {
			return fmt.Errorf("write CDI spec: %w", err)
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("write CDI spec: %w", err)
	}
	s.known[name] = specFile{data, info}
	if s.damaged[name] && differs {
		s.repaired = append(s.repaired, name)
	}
	delete(s.damaged, name)
	return nil
}

func (s *Store) remove(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.known, name)
	delete(s.damaged, name)
	path := filepath.Join(s.root, name)
	for _, path := range []string{path, unfinished(path)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove CDI spec: %w", err)
		}
	}
	return nil
}

// encode sets the lowest CDI version that the spec's content allows, because older runtimes refuse
// newer versions. It returns the spec as JSON, or an error if a runtime could not load it.
func encode(spec *specs.Spec) ([]byte, error) {
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("find its version: %w", err)
	}
	spec.Version = version
	if err := validate(spec); err != nil {
		return nil, err
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	if isPlain(data) {
		return data, nil
	}
	if _, err := cdilib.ParseSpec(data); err != nil {
		return nil, fmt.Errorf("the runtime could not read it: %w", err)
	}
	return data, nil
}

// isPlain reports whether data is printable ASCII. Runtimes parse specs as YAML, which accepts any
// such JSON, but not every other character. So encode calls the slow YAML parser only for specs
// that are not plain.
func isPlain(data []byte) bool {
	return !slices.ContainsFunc(data, func(b byte) bool { return b < ' ' || b > '~' })
}

// validate applies the rules by which the CDI library loads a spec. One bad device makes the
// runtime refuse the whole file.
func validate(spec *specs.Spec) error {
	if len(spec.Devices) == 0 {
		return errors.New("it has no devices")
	}
	if err := (&cdilib.ContainerEdits{ContainerEdits: &spec.ContainerEdits}).Validate(); err != nil {
		return fmt.Errorf("common edits: %w", err)
	}
	seen := map[string]bool{}
	for i := range spec.Devices {
		d := &spec.Devices[i]
		if err := parser.ValidateDeviceName(d.Name); err != nil {
			return err
		}
		if seen[d.Name] {
			return fmt.Errorf("duplicate device %s", d.Name)
		}
		seen[d.Name] = true
		if isEmpty(d.ContainerEdits) {
			return fmt.Errorf("device %s has no edits, which CDI refuses", d.Name)
		}
		if err := (&cdilib.ContainerEdits{ContainerEdits: &d.ContainerEdits}).Validate(); err != nil {
			return fmt.Errorf("device %s: %w", d.Name, err)
		}
	}
	return nil
}

func isEmpty(e specs.ContainerEdits) bool {
	return len(e.Env)+len(e.DeviceNodes)+len(e.Hooks)+len(e.Mounts)+len(e.NetDevices)+len(e.AdditionalGIDs) == 0 && e.IntelRdt == nil
}

// replace writes data to path so that a reader sees the old file or the new one. CDI reads only
// *.json and *.yaml, so it ignores the temporary file. fsync is not needed, because the plugin
// writes the specs again after a crash of the node.
func replace(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := create(path)
	if err != nil {
		return withTargetPath(path, err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return withTargetPath(path, err)
}

// withTargetPath replaces the temporary file's path in an error by path. The temporary path changes
// with each try, and a caller that logs only new errors would log each one.
func withTargetPath(path string, err error) error {
	var file *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &file):
		return &fs.PathError{Op: file.Op, Path: path, Err: file.Err}
	case errors.As(err, &link):
		return &fs.PathError{Op: link.Op, Path: path, Err: link.Err}
	}
	return err
}

// create creates the temporary file for path. For a claim's spec the name is fixed, because calls
// for one claim run one after another in all processes. create removes a leftover with this name
// instead of writing to it. For the base spec the name is random, because two plugin instances may
// write it at once.
func create(path string) (*os.File, error) {
	if _, claim := claimOf(filepath.Base(path)); !claim {
		return os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+temporary+"*")
	}
	const flags = os.O_CREATE | os.O_EXCL | os.O_WRONLY
	f, err := os.OpenFile(unfinished(path), flags, 0o600)
	if !errors.Is(err, fs.ErrExist) {
		return f, err
	}
	if err := os.Remove(unfinished(path)); err != nil {
		return nil, err
	}
	return os.OpenFile(unfinished(path), flags, 0o600)
}

// unfinished returns the path of the temporary file for the claim's spec at path.
func unfinished(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+ofClaim)
}
