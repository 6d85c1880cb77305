// Owns recording calls of attention, whose pieces are rows where each has one.
#pragma once

#include "record.h"
#include "tensor_checks.h"

namespace sgl_batch {

// Where the pieces of a call lie, as check_pieces takes it.
struct PieceTensors {
  at::Tensor starts, lengths, table_starts, tables;
  int64_t page, num_pages;
};

// Runs a call over `pieces`, which have been checked, and records it. Pieces of several rows are recorded as none, which is of no use.
template <typename Call>
void run_and_record(const char* name, const Call& call, void (*run)(const Call&), const PieceTensors& pieces,
                    std::initializer_list<at::Tensor> tensors) {
  const bool by_row = pieces.starts.data_ptr<int64_t>()[call.pieces] == call.pieces;
  const auto with = [call, by_row, run](int64_t rows) {
    Call own = call;
    if (by_row) own.pieces = rows;
    run(own);
  };
  const auto check = [pieces](int64_t rows) {
    check_pieces(pieces.starts.narrow(0, 0, rows + 1), pieces.lengths.narrow(0, 0, rows), pieces.table_starts.narrow(0, 0, rows),
                 pieces.tables, rows, pieces.page, pieces.num_pages);
  };
  run_and_record(name, by_row ? call.pieces : -1, tensors, with, check);
}

}  // namespace sgl_batch
