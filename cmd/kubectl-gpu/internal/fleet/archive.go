package fleet

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// manifestFile is the archive's first file. The other files have one kind of object each.
const manifestFile = "manifest.json"

// maxArchive limits what is read from an archive, so that a crafted one cannot fill the memory.
const maxArchive = 1 << 30

// Manifest describes an archive.
type Manifest struct {
	// Format is the version of the archive's form.
	Format  int             `json:"format"`
	Program string          `json:"program"`
	Time    metav1.Time     `json:"time"`
	Version string          `json:"kubernetes"`
	Gates   map[string]bool `json:"featureGates,omitempty"`
	Files   []ArchivedFile  `json:"files"`
	// LeftOut says what is not in the archive: unreadable objects, or those above the size limit.
	LeftOut []string `json:"leftOut,omitempty"`
	// PodsRedacted means that Pods have only their names, claims and nodes.
	PodsRedacted bool `json:"podsRedacted"`
}

// ArchivedFile is one file of an archive.
type ArchivedFile struct {
	Name   string `json:"name"`
	Bytes  int    `json:"bytes"`
	SHA256 string `json:"sha256"`
}

const archiveFormat = 1

// ArchiveOptions say what goes into an archive.
type ArchiveOptions struct {
	// Program is the version of the program that writes.
	Program string
	Time    time.Time
	// Pods keeps what the scheduler looks at in Pods. Otherwise only names, claims and nodes stay.
	Pods bool
	// MaxBytes limits the size of all files before compression. The least important ones are left out.
	MaxBytes int
	// Logs are the least important of all.
	Logs []Log
}

// files lists the kinds of objects in an archive, the most important ones first.
func (s *Snapshot) files() []archived {
	return []archived{
		{"resourceslices.json", &s.Slices}, {"resourceclaims.json", &s.Claims}, {"deviceclasses.json", &s.Classes},
		{"nodes.json", &s.Nodes}, {"devicetaintrules.json", &s.TaintRules}, {"configs.json", &s.Configs},
		{"settings.json", &s.Settings},
		{"daemonsets.json", &s.DaemonSets}, {"resourceclaimtemplates.json", &s.Templates}, {"pods.json", &s.Pods},
	}
}

type archived struct {
	name    string
	objects any
}

// WriteArchive writes the snapshot as a tar.gz.
func (s *Snapshot) WriteArchive(w io.Writer, o ArchiveOptions) (Manifest, error) {
	m := Manifest{
		Format: archiveFormat, Program: o.Program, Time: metav1.NewTime(o.Time.UTC()), Version: s.Version, Gates: s.Gates,
		LeftOut: append([]string(nil), s.Missing...), PodsRedacted: !o.Pods,
	}
	kept := *s
	if !o.Pods {
		kept.Pods = redactPods(s.Pods)
	}
	total := 0
	contents := map[string][]byte{}
	put := func(name string, content []byte) {
		if o.MaxBytes > 0 && total+len(content) > o.MaxBytes {
			m.LeftOut = append(m.LeftOut, fmt.Sprintf("%s: its %d bytes exceed the limit of %d in total (--max-bytes)",
				name, len(content), o.MaxBytes))
			return
		}
		total += len(content)
		contents[name] = content
		sum := sha256.Sum256(content)
		m.Files = append(m.Files, ArchivedFile{name, len(content), hex.EncodeToString(sum[:])})
	}
	for _, f := range kept.files() {
		content, err := json.Marshal(f.objects)
		if err != nil {
			return m, fmt.Errorf("encode %s: %w", f.name, err)
		}
		put(f.name, content)
	}
	for _, log := range o.Logs {
		put("logs/"+log.Name+".log", log.Text)
	}
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return m, err
	}
	zip := gzip.NewWriter(w)
	out := tar.NewWriter(zip)
	add := func(name string, content []byte) error {
		header := &tar.Header{Name: "gpu-gather/" + name, Mode: 0o644, Size: int64(len(content)), ModTime: o.Time}
		if err := out.WriteHeader(header); err != nil {
			return err
		}
		_, err := out.Write(content)
		return err
	}
	if err := add(manifestFile, text); err != nil {
		return m, err
	}
	for _, f := range m.Files {
		if err := add(f.Name, contents[f.Name]); err != nil {
			return m, err
		}
	}
	return m, errors.Join(out.Close(), zip.Close())
}

// redactPods returns the Pods with nothing but names, claims, node and phase.
func redactPods(pods []*corev1.Pod) []*corev1.Pod {
	var kept []*corev1.Pod
	for _, p := range pods {
		if len(p.Spec.ResourceClaims) == 0 && p.Status.ExtendedResourceClaimStatus == nil {
			continue
		}
		kept = append(kept, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID},
			Spec:       corev1.PodSpec{NodeName: p.Spec.NodeName, ResourceClaims: p.Spec.ResourceClaims},
			Status: corev1.PodStatus{
				Phase: p.Status.Phase, ResourceClaimStatuses: p.Status.ResourceClaimStatuses,
				ExtendedResourceClaimStatus: p.Status.ExtendedResourceClaimStatus,
			},
		})
	}
	return kept
}

// ReadArchive reads an archive that [Snapshot.WriteArchive] wrote.
func ReadArchive(path string) (*Snapshot, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	s, err := readArchive(f)
	if err != nil {
		return nil, fmt.Errorf("%s is not an archive of `kubectl gpu gather`: %w", path, err)
	}
	return s, nil
}

func readArchive(r io.Reader) (*Snapshot, error) {
	zip, err := gzip.NewReader(r)
	if err != nil {
		return nil, err
	}
	s := &Snapshot{Configs: map[string]string{}, Settings: map[string]string{}}
	var m Manifest
	into := map[string]any{manifestFile: &m}
	for _, f := range s.files() {
		into[f.name] = f.objects
	}
	found := false
	files := tar.NewReader(io.LimitReader(zip, maxArchive))
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		name := header.FileInfo().Name()
		target, known := into[name]
		if !known {
			continue
		}
		if err := json.NewDecoder(files).Decode(target); err != nil {
			return nil, fmt.Errorf("file %s: %w", name, err)
		}
		found = found || name == manifestFile
	}
	if !found {
		return nil, fmt.Errorf("it has no %s", manifestFile)
	}
	if m.Format != archiveFormat {
		return nil, fmt.Errorf("its format is %d, and this program reads %d: use the kubectl-gpu that wrote it", m.Format, archiveFormat)
	}
	s.dropNull()
	s.Share()
	s.Version, s.Gates, s.Missing = m.Version, m.Gates, m.LeftOut
	// The slices already have the taints of the rules.
	rules := s.TaintRules
	s.TaintRules = nil
	s.prepare()
	s.TaintRules = rules
	return s, nil
}

// dropNull removes null objects, which only a damaged archive has.
func (s *Snapshot) dropNull() {
	s.Nodes, s.Slices, s.Claims = withoutNull(s.Nodes), withoutNull(s.Slices), withoutNull(s.Claims)
	s.Classes, s.Templates, s.Pods = withoutNull(s.Classes), withoutNull(s.Templates), withoutNull(s.Pods)
	s.DaemonSets, s.TaintRules = withoutNull(s.DaemonSets), withoutNull(s.TaintRules)
}

func withoutNull[T any](all []*T) []*T {
	return slices.DeleteFunc(all, func(o *T) bool { return o == nil })
}
