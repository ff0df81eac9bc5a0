package supervisor

import (
	"encoding/json"
	"fmt"
	"net/http"

	"k8s.io/klog/v2"

	"github.com/gpu-dra-driver/gpu-dra-driver/pkg/mps"
)

// maxRequest is far beyond a daemon of [mps.Daemon.Validate]'s limits.
const maxRequest = 1 << 20

func (s *Supervisor) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+mps.Resource, func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, s.List()) })
	mux.HandleFunc("PUT "+mps.Resource+"/{id}", s.put)
	mux.HandleFunc("DELETE "+mps.Resource+"/{id}", s.delete)
	return mux
}

func (s *Supervisor) put(w http.ResponseWriter, r *http.Request) {
	var spec mps.Daemon
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	// A plugin that is newer may ask for what this supervisor does not know. To leave it out in silence would be to promise it.
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&spec); err != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf("the MPS supervisor on this node does not understand the request (is it older than the plugin? delete its Pod when no client runs): %w", err))
		return
	}
	if id := r.PathValue("id"); spec.ID != id {
		fail(w, http.StatusBadRequest, fmt.Errorf("the request is for MPS daemon %.100q and describes %.100q", id, spec.ID))
		return
	}
	if err := spec.Validate(); err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if err := s.Start(r.Context(), spec); err != nil {
		klog.FromContext(s.ctx).Error(err, "MPS daemon could not be started", "daemon", spec.ID)
		fail(w, http.StatusInternalServerError, err)
		return
	}
	answer(w, http.StatusOK, struct{}{})
}

func (s *Supervisor) delete(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if !mps.ValidID(id) {
		fail(w, http.StatusBadRequest, fmt.Errorf("%.100q cannot be the ID of an MPS daemon", id))
		return
	}
	if err := s.Stop(r.Context(), id); err != nil {
		klog.FromContext(s.ctx).Error(err, "MPS daemon could not be stopped", "daemon", id)
		fail(w, http.StatusInternalServerError, err)
		return
	}
	answer(w, http.StatusOK, struct{}{})
}

func fail(w http.ResponseWriter, code int, err error) {
	answer(w, code, mps.Failure{Error: err.Error()})
}

func answer(w http.ResponseWriter, code int, content any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(content) // Who asked may be gone.
}
